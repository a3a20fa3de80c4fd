"""Operations on the pixels of one image, which RandAugment and the policies apply."""
