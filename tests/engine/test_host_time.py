"""What the host does in a step of many sequences; counted in calls, which do not depend on the machine."""

from workshop.host_time import calls_of_a_step, replaying_engine

SEQUENCES = 48
# Of Python functions, for each sequence: 40, about 11 us. `python workshop/host_time.py` measures it.
MOST_CALLS = 45


def test_a_plain_step_of_many_takes_few_calls(tiny_model):
    engine = replaying_engine(tiny_model(layers=4), SEQUENCES, 8)
    lengths = list(engine.states.lengths)
    calls = [calls_of_a_step(engine) for _ in range(3)]
    assert engine.states.lengths == [length + 3 for length in lengths]
    assert min(calls) <= MOST_CALLS * SEQUENCES, f"{min(calls) / SEQUENCES:.1f} calls a sequence"
