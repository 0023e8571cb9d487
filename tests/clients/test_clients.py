"""Real client libraries against `bough serve` with the pair inside the package.

Run with `pytest -m clients tests/clients`; needs pip and npm, and registries that they can reach. The model
is small and its answers are of no use: the programs check what the protocols promise. Objects validate, tool
calls have valid arguments and their results can be sent back, streams end and give the text of the whole
answer, finish reasons and token counts are there.
"""

import re

import pytest

from tests.clients.environments import CLIENTS, PROGRAMS, Client

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

CASE = re.compile(r"^(?:(?:async )?def |  )(case_\w+)(?=\(\)|:)", re.M)


def cases(client: Client) -> list[str]:
    found = CASE.findall((PROGRAMS / client.program).read_text())
    assert found, client.program
    return found


@pytest.mark.parametrize(
    "client, case",
    [pytest.param(each, case, id=f"{each.name}-{case[5:]}") for each in CLIENTS for case in cases(each)],
)
def test_client(client: Client, case: str, results, request: pytest.FixtureRequest) -> None:
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    found = results(client, [each["case"] for each in chosen if each.get("client") == client])
    if case not in found:
        pytest.fail(f"the program ended before this case:\n{found['']}", pytrace=False)
    if error := found[case]["error"]:
        pytest.fail(error[-4000:], pytrace=False)
