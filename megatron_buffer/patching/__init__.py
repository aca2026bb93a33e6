"""The only package that writes into ``megatron.*``.

``targets.py`` says what is replaced, ``fingerprints.py`` whether the installed sources are known,
``engine.py`` does it as one transaction, ``holders.py`` finds everybody who holds the old object,
``lifecycle.py`` is the interface, ``doctor.py`` explains all of it.
"""

from megatron_buffer.patching.doctor import doctor_report
from megatron_buffer.patching.lifecycle import activated, install, installed_config, uninstall

__all__ = ['activated', 'doctor_report', 'install', 'installed_config', 'uninstall']
