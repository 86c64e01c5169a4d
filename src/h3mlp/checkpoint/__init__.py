"""Checkpoints of every origin, to prepacked FP8, with no GPU.

From the bottom up: ``names`` says which layer a tensor belongs to, ``container`` reads safetensors in bounded memory,
``lora`` finds what an adapter adds to FC1, ``source`` makes FC1 layers of any checkpoint's tensors, ``packer`` makes of
one what the kernels take, ``prepared`` is the format that is written and loaded, ``writer`` puts it on disk whole or
not at all. The jobs on top are ``convert``, ``inspect`` and ``verify``, each a command of that name.
"""
