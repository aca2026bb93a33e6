"""The exact buffers of any rank of any job, in one process, without a GPU.

``job`` is the parallelism, ``architecture`` the model files, ``model`` builds Megatron's own model on
the meta device inside the fake world of ``world``, ``collect`` lays its parameters out with the same pure
code as the runtime into a ``view``, ``render``, ``as_json``, ``plot`` and ``diff`` show it, and
``command`` is ``megatron-buffer layout``. This module and ``command`` import neither torch nor megatron.
Upstream has no counterpart.
"""
