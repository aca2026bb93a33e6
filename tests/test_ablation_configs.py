"""``configs/ablations``: one file per alternative, each with one axis unlike upstream's."""

import pytest
import yaml

from megatron_buffer.config import AXES, BufferConfig, load_config, shipped_configs, to_dict

ABLATIONS = {
    name.removeprefix('ablations/'): path
    for name, path in shipped_configs().items()
    if name.startswith('ablations/')
}
ALTERNATIVES = [
    (axis.key, name) for axis in AXES.values() for name in axis.strategies if name != axis.default
]


def test_every_alternative_has_exactly_one_file():
    assert sorted(ABLATIONS) == sorted(f'{axis}-{name}' for axis, name in ALTERNATIVES)


@pytest.mark.parametrize('name', ABLATIONS)
def test_an_ablation_differs_from_upstream_in_the_one_axis_that_its_name_says(name):
    axis, _, strategy = name.partition('-')
    said = yaml.safe_load(ABLATIONS[name].read_text())
    assert list(said) == ['schema_version', axis]
    config = load_config(f'ablations/{name}')
    upstream, resolved = to_dict(BufferConfig()), to_dict(config)
    assert [key for key in upstream if upstream[key] != resolved[key]] == [axis]
    assert getattr(config, axis).name == strategy
    assert config.short_str().startswith(f'{axis}={strategy}')


@pytest.mark.parametrize('name', ABLATIONS)
def test_an_ablation_says_what_it_asks_and_what_to_expect(name):
    comment, _, rest = ABLATIONS[name].read_text().partition('\n\n')
    lines = comment.splitlines()
    assert all(line.startswith('#') and len(line) <= 100 for line in lines)
    assert '#' not in rest
    question, expected = comment.split('\n#\n')[:2]
    assert '?' in question
    assert expected.startswith('# Expect: ')


def test_recommended_differs_from_upstream_where_it_says_so():
    path = shipped_configs()['recommended']
    marked = {
        after.partition(':')[0]
        for block in path.read_text().split('\n# * ')[1:]
        for after in [next(line for line in block.splitlines()[1:] if line[0] not in '# ')]
    }
    upstream, recommended = to_dict(BufferConfig()), to_dict(load_config('recommended'))
    assert {key for key in upstream if upstream[key] != recommended[key]} == marked
    runtime = {'readiness', 'dispatch_order', 'unused_params', 'accumulation', 'finalize'}
    assert marked == {*runtime, 'bucket_isolation', 'padding', 'checks'}
