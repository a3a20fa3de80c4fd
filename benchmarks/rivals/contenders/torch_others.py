"""ViT-S/16 and ConvNeXt-T in PyTorch, with the names of timm and torchvision, for machines without these libraries.

Sources: arXiv:2010.11929 and arXiv:2012.12877 (ViT), arXiv:2201.03545 (ConvNeXt).
"""

import torch
from torch import nn
from torch.nn import functional

EPSILON = 1e-6


class ViTBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, EPSILON), nn.LayerNorm(width, EPSILON)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0))
        x = x + self.attn["proj"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp["fc2"](functional.gelu(self.mlp["fc1"](self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, size: int, classes: int, width: int = 384, heads: int = 6, blocks: int = 12):
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, 16, 16)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (size // 16) ** 2, width))
        self.blocks = nn.Sequential(*(ViTBlock(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width, EPSILON), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ChannelsFirstNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        depthwise, first, second = nn.Conv2d(width, width, 7, 1, 3, 1, width), nn.Linear(width, 4 * width), nn.GELU()
        # The empty modules take the places of torchvision's permutations.
        layers = (depthwise, nn.Identity(), nn.LayerNorm(width, EPSILON), first, second, nn.Linear(4 * width, width))
        self.block, self.layer_scale = nn.Sequential(*layers), nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block[1:](self.block[0](x).permute(0, 2, 3, 1)) * self.layer_scale
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, classes: int, stages: tuple[int, ...] = (3, 3, 9, 3), width: int = 96):
        super().__init__()
        layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, width, 4, 4), ChannelsFirstNorm(width, EPSILON))]
        for stage, blocks in enumerate(stages):
            features = width * 2**stage
            if stage:
                before = ChannelsFirstNorm(features // 2, EPSILON)
                layers.append(nn.Sequential(before, nn.Conv2d(features // 2, features, 2, 2)))
            layers.append(nn.Sequential(*(ConvNeXtBlock(features) for _ in range(blocks))))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.LayerNorm(features, EPSILON), nn.Identity(), nn.Linear(features, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).mean((2, 3)))
