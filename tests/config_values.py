"""Random valid parameters of every built-in strategy, for tests that draw configs."""

from typing import Any

from hypothesis import strategies as st

from megatron_buffer import config_catalog
from megatron_buffer.config import AXES
from megatron_buffer.config_steps import STEPS

_NUMBERS = st.integers(1, 2**63 - 1)
# Up to U+FFFF: JSON writes what is beyond as two escapes, and YAML reads them as two characters.
_LETTERS = st.characters(max_codepoint=0xFFFF, exclude_categories=['Cs'])
_PATTERNS = st.text(_LETTERS, min_size=1, max_size=20)
_DTYPES = st.sampled_from(['fp32', 'bf16', 'fp16'])


def _some_patterns(at_least: int) -> st.SearchStrategy[list[str]]:
    return st.lists(_PATTERNS, min_size=at_least, max_size=6, unique=True)


def _rules(key: str, values: st.SearchStrategy[Any], at_least: int) -> st.SearchStrategy[Any]:
    return st.dictionaries(_PATTERNS, values, min_size=at_least, max_size=6).map(
        lambda said: [{'pattern': pattern, key: value} for pattern, value in said.items()]
    )


_CHUNKS = st.fixed_dictionaries({}, optional={'chunk_bytes': st.none() | _NUMBERS})


VALUES: dict[str, st.SearchStrategy[Any]] = {
    'rules': _rules('grad_dtype', _DTYPES, 1),
    'seed': st.integers(0, 2**63 - 1),
    'profile': _PATTERNS,
    'network': _PATTERNS,
    'bucket_size_elems': st.none() | _NUMBERS,
    'first_size_elems': _NUMBERS,
    'last_size_elems': _NUMBERS,
    'num_buckets': _NUMBERS,
    'pattern': _PATTERNS,
    'modules_per_bucket': _NUMBERS,
    'boundaries': _some_patterns(0),
    'patterns': _some_patterns(1),
    'param_start_elems': _NUMBERS,
    'bucket_end_elems': _NUMBERS,
    'param_start_bytes': _NUMBERS,
    'bucket_end_bytes': _NUMBERS,
    'high_busbw': st.none() | st.booleans(),
    'counts': _rules('count', st.integers(0, 2**63 - 1), 0),
    'wire_dtype': st.none() | _DTYPES,
    'order': st.none() | st.just(list(STEPS)),
    'options': st.fixed_dictionaries(
        {}, optional={'non_tp_grads': _CHUNKS, 'gtp_replicated_grads': _CHUNKS}
    ),
}
"""Valid values of parameters by their names; the others are a choice of words, or true or false."""


def values_of(doc: config_catalog.ParamDoc) -> st.SearchStrategy[Any]:
    """Valid values of one parameter."""
    if doc.name in VALUES:
        return VALUES[doc.name]
    if doc.choices:
        return st.sampled_from(doc.choices)
    assert doc.expected == 'true or false', f'add values of {doc.name} here'
    return st.booleans()


def mappings_of(cls: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Valid parameters of a dataclass as YAML holds them, without its name."""
    docs = config_catalog.param_docs(cls)
    return st.fixed_dictionaries(
        {doc.name: values_of(doc) for doc in docs if doc.required},
        optional={doc.name: values_of(doc) for doc in docs if not doc.required},
    )


def choices_of(axis: str) -> st.SearchStrategy[Any]:
    """Every way in which YAML can choose a built-in strategy of an axis."""
    forms: list[st.SearchStrategy[Any]] = [st.none()]
    for name, cls in AXES[axis].strategies.items():
        forms.append(mappings_of(cls).map(lambda params, name=name: {'name': name, **params}))
        if not any(doc.required for doc in config_catalog.param_docs(cls)):
            forms.append(st.just(name))
    return st.one_of(forms)


def example_of(cls: type[Any]) -> Any:
    """Parameters of a dataclass with its defaults, and something valid where there are none."""
    examples: dict[str, Any] = {
        'rules': [{'pattern': '*.router.*', 'grad_dtype': 'fp32'}],
        'profile': 'profile.json',
        'num_buckets': 2,
        'first_size_elems': 10,
        'last_size_elems': 10,
        'boundaries': ['a.weight'],
        'patterns': ['*a*'],
    }
    required = [doc.name for doc in config_catalog.param_docs(cls) if doc.required]
    return config_catalog.adapter(cls).validate_python(
        {name: examples[name] for name in required}, strict=False
    )
