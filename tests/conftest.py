"""Fixtures: a model for each test, and both real SDKs to talk to it. No test uses a key or leaves this machine."""
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import offline  # noqa: E402


@pytest.fixture
def model():
    """A factory: model(script=None, **options) -> offline.Server. What it made is closed at the end."""
    servers = []

    def make(script=None, **options):
        servers.append(offline.Server(script, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def openai_client():
    """openai_client(server) -> an OpenAI client that does not retry."""
    import openai
    client = openai.OpenAI(api_key="any", base_url="http://127.0.0.1", max_retries=0, timeout=10)
    return lambda server, **options: client.with_options(base_url=server.base_url, **options)


@pytest.fixture(scope="session")
def anthropic_client():
    """anthropic_client(server) -> an Anthropic client that does not retry."""
    import anthropic
    client = anthropic.Anthropic(api_key="any", base_url="http://127.0.0.1", max_retries=0, timeout=10)
    return lambda server, **options: client.with_options(base_url=server.root, **options)
