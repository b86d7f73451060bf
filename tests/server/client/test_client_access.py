"""What the client says of who calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.client import Client, Tls
from jaxserve.client.connection import key_metadata

SENT = (("authorization", "Bearer mine"),)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXSERVE_API_KEY", raising=False)


def test_the_key_is_the_environment_s_unless_another_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert key_metadata(None, "localhost:1", None) == ()
    monkeypatch.setenv("JAXSERVE_API_KEY", "mine\n")
    assert key_metadata(None, "localhost:1", None) == SENT
    monkeypatch.setenv("JAXSERVE_API_KEY", "another")
    assert key_metadata("mine", "localhost:1", None) == SENT
    assert key_metadata("", "localhost:1", None) == ()


@pytest.mark.parametrize("key", ["a b", "ä", "a\nb", "a\x00"])
def test_what_no_key_is_is_not_sent(key: str) -> None:
    with pytest.raises(ValueError, match="the API key: must be printable ASCII") as error:
        Client("localhost:1", api_key=key)
    assert key not in str(error.value)


@pytest.mark.parametrize(
    ("address", "tls", "warns"),
    [
        ("localhost:1", None, False),
        ("127.0.0.1:1", None, False),
        ("[::1]:1", None, False),
        ("unix:/socket", None, False),
        ("192.0.2.1:1", None, True),
        ("box:1", None, True),
        ("box:1", Tls(), False),
    ],
)
def test_a_key_that_leaves_the_machine_in_the_clear_is_one_line(
    address: str, tls: Tls | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Client(address, api_key="mine", tls=tls).close()
    line = f"the API key goes to {address} in the clear: there is no TLS"
    assert caplog.messages == ([line] if warns else [])
    caplog.clear()
    Client(address, tls=tls).close()
    assert caplog.messages == []


def test_half_of_a_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a certificate and its key go together"):
        Client("box:1", tls=Tls(cert=tmp_path / "cert"))
    with pytest.raises(OSError, match="No such file"):
        Client("box:1", tls=Tls(ca=tmp_path / "none"))
