"""The exact buffers of any rank of any job, in one process, without a GPU.

``job`` is the parallelism, ``architecture`` the model files, ``model`` builds Megatron's own model on
the meta device inside the fake world of ``world``, ``collect`` lays its parameters out with the same pure
code as the runtime into a ``view``, ``render``, ``as_json``, ``plot`` and ``diff`` show it, and
``command`` is ``megatron-buffer layout``. ``plan_command`` is ``megatron-buffer plan``: ``ledger`` is its
arithmetic, ``stages`` applies it to layouts and ``averages`` to a number of parameters; ``hf`` and
``megatron_args`` read models from elsewhere. This module and the commands import neither torch nor megatron.
Upstream has no counterpart.
"""
