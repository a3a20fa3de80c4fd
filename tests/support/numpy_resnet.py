"""An independent implementation of ResNet v1.5 in NumPy, from the papers alone: values, running statistics and
gradients.

Every operation returns its result and a function that propagates the gradient back. Images are [B, H, W, C]; kernels
are [kh, kw, in, out]; everything is float64. `params` and `stats` are the network's nested dicts, of NumPy arrays.

Batch norm: Ioffe and Szegedy 2015 (arXiv:1502.03167). As in Flax, the running variance is the biased one."""

import numpy as np

EPSILON = 1e-5
MOMENTUM = 0.9

STAGE_SIZES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def convolution(x, kernel, stride):
    """Correlate with (k - 1) // 2 pixels of zero padding on every side."""
    kh, kw, _, _ = kernel.shape
    pad = (kh - 1) // 2
    height, width = x.shape[1:3]
    out_h, out_w = (height + 2 * pad - kh) // stride + 1, (width + 2 * pad - kw) // stride + 1
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))

    def window(array, i, j):
        return array[:, i : i + stride * out_h : stride, j : j + stride * out_w : stride]

    y = sum(window(padded, i, j) @ kernel[i, j] for i in range(kh) for j in range(kw))

    def back(dy):
        d_padded, d_kernel = np.zeros_like(padded), np.zeros_like(kernel)
        for i in range(kh):
            for j in range(kw):
                d_kernel[i, j] = np.tensordot(window(padded, i, j), dy, axes=((0, 1, 2), (0, 1, 2)))
                window(d_padded, i, j)[...] += dy @ kernel[i, j].T
        return d_padded[:, pad : pad + height, pad : pad + width], {"kernel": d_kernel}

    return y, back


def batch_norm(x, params, stats, train):
    """Return y, the new running statistics, and the backward function."""
    if train:
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        new_stats = {
            "mean": MOMENTUM * stats["mean"] + (1 - MOMENTUM) * mean,
            "var": MOMENTUM * stats["var"] + (1 - MOMENTUM) * variance,
        }
    else:
        mean, variance, new_stats = stats["mean"], stats["var"], stats
    deviation = np.sqrt(variance + EPSILON)
    normalized = (x - mean) / deviation

    def back(dy):
        gradients = {"scale": (dy * normalized).sum((0, 1, 2)), "bias": dy.sum((0, 1, 2))}
        dn = dy * params["scale"]
        if train:
            dn = dn - dn.mean((0, 1, 2)) - normalized * (dn * normalized).mean((0, 1, 2))
        return dn / deviation, gradients

    return normalized * params["scale"] + params["bias"], new_stats, back


def relu(x):
    return np.where(x > 0, x, 0.0), lambda dy: np.where(x > 0, dy, 0.0)


def max_pool(x):
    """Take the maximum over 3x3 pixels, stride 2, with one pixel of padding that never wins. The first of equal maxima
    gets the gradient."""
    height, width = x.shape[1:3]
    out_h, out_w = (height - 1) // 2 + 1, (width - 1) // 2 + 1
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    windows = [
        padded[:, i : i + 2 * out_h : 2, j : j + 2 * out_w : 2][:, :out_h, :out_w] for i in range(3) for j in range(3)
    ]
    winner = np.argmax(windows, axis=0)

    def back(dy):
        dx = np.zeros_like(padded)
        b, h, w, c = np.indices(dy.shape)
        np.add.at(dx, (b, 2 * h + winner // 3, 2 * w + winner % 3, c), dy)
        return dx[:, 1:-1, 1:-1]

    return np.max(windows, axis=0), back


def conv_norm(x, names, params, stats, train, stride, gradients):
    """Apply a convolution and its batch norm, named ("conv1", "bn1"). The backward function stores both gradients in
    `gradients`."""
    conv_name, norm_name = names
    y, conv_back = convolution(x, params[conv_name]["kernel"], stride)
    y, new_stats, norm_back = batch_norm(y, params[norm_name], stats[norm_name], train)

    def back(dy):
        dy, gradients[norm_name] = norm_back(dy)
        dx, gradients[conv_name] = conv_back(dy)
        return dx

    return y, new_stats, back


def residual_block(x, params, stats, train, stride):
    """Apply a basic block (two convolutions named) or a bottleneck (three); the first 3x3 convolution has the
    stride."""
    count = sum(name.startswith("conv") for name in params)
    strided = 2 if count == 3 else 1
    gradients, new_stats, backs, y = {}, {}, [], x
    for i in range(1, count + 1):
        names = (f"conv{i}", f"bn{i}")
        y, new_stats[names[1]], back = conv_norm(
            y, names, params, stats, train, stride if i == strided else 1, gradients
        )
        backs.append(back)
        if i < count:
            y, back = relu(y)
            backs.append(back)
    shortcut, shortcut_back = x, lambda dy: dy
    if "downsample_bn" not in params and "downsample_conv" in params:
        shortcut, conv_back = convolution(x, params["downsample_conv"]["kernel"], stride)
        shortcut = shortcut + params["downsample_conv"]["bias"]

        def shortcut_back(dy):
            dx, gradient = conv_back(dy)
            gradients["downsample_conv"] = {**gradient, "bias": dy.sum((0, 1, 2))}
            return dx

    elif "downsample_conv" in params:
        names = ("downsample_conv", "downsample_bn")
        shortcut, new_stats[names[1]], shortcut_back = conv_norm(x, names, params, stats, train, stride, gradients)
    y, last_back = relu(y + shortcut)

    def back(dy):
        dy = last_back(dy)
        d_shortcut = shortcut_back(dy)
        for step in reversed(backs):
            dy = step(dy)
        return dy + d_shortcut, gradients

    return y, new_stats, back


def resnet(depth, params, stats, images, train):
    """Return logits [B, K], new running statistics and the backward function: d_logits -> (d_images, gradients)."""
    gradients, new_stats = {}, {}
    x, new_stats["bn1"], stem_back = conv_norm(images, ("conv1", "bn1"), params, stats, train, 2, gradients)
    x, relu_back = relu(x)
    x, pool_back = max_pool(x)
    blocks = []
    for stage, size in enumerate(STAGE_SIZES[depth], start=1):
        for block in range(size):
            name = f"layer{stage}_{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            x, new_stats[name], back = residual_block(x, params[name], stats[name], train, stride)
            blocks.append((name, back))
    height, width = x.shape[1:3]
    features = x.mean((1, 2))
    logits = features @ params["fc"]["kernel"] + params["fc"]["bias"]

    def back(d_logits):
        gradients["fc"] = {"kernel": features.T @ d_logits, "bias": d_logits.sum(0)}
        dx = (d_logits @ params["fc"]["kernel"].T)[:, None, None, :] / (height * width)
        dx = np.broadcast_to(dx, x.shape)
        for name, block_back in reversed(blocks):
            dx, gradients[name] = block_back(dx)
        return stem_back(relu_back(pool_back(dx))), gradients

    return logits, new_stats, back
