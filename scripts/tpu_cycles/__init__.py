"""Cycles and DMA bytes of Pallas TPU kernels, counted without a TPU; scripts/tpu_roofline.py prints them."""
