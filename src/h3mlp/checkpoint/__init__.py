"""Checkpoints of every origin, to prepacked FP8, with no GPU.

Reading, from the bottom up: ``names`` says which layer a tensor belongs to, ``hub`` finds snapshots in Hugging Face's
cache, ``container`` reads safetensors in bounded memory, ``lora`` finds what an adapter adds to FC1 (``adapter_keys``:
which tensor is for what; ``adapter_config``: what the adapter says of itself), ``source`` makes FC1 layers of any
checkpoint's tensors, ``packer`` makes of one what the kernels take.

Writing: ``prepared`` is the format that is written and loaded, ``destination`` what is there already and must not be
lost, ``layout`` what goes into which file, ``scratch`` the hidden folder where it is made, ``writer`` puts it on disk
whole or not at all.

The jobs on top are ``convert``, ``inspect`` and ``verify``, each a command of that name.
"""
