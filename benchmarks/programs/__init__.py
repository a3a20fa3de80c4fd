"""What compiled training steps are made of, counted without the device that would run them."""
