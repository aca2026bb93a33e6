"""Real Transformer Engine tensor classes on a CPU: a stand-in for the compiled module, kernels in pure torch.

Transformer Engine's Python part (installed by ``scripts/setup.sh --te`` into a folder of its own) holds the
tensor classes, the quantizers and the code that casts master weights; what it calls in the compiled module
``transformer_engine_torch`` is here. ``extension`` is the module, ``kernels`` and ``nvfp4`` are its kernels,
``preload`` loads all of it into a fork server of its own, ``model`` and ``training`` are what the tests train.
"""
