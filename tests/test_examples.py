"""Every example runs, and does what it says."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_server_loop_gives_each_request_the_tokens_it_gets_alone(capsys):
    example = runpy.run_path(str(EXAMPLES / "server_loop.py"), run_name="__main__")
    output = capsys.readouterr().out
    # requests overlap: a step that decodes some and computes chunks of other prompts
    assert re.search(r"step +\d+: 1 \+ 1 \+ \d\d ", output)
    requests, serve, model = (example[name] for name in ("requests", "serve", "Model"))
    assert len(requests) > 3
    for request in requests:
        assert len(request.generated) == request.max_tokens
        assert str(request.generated) in output
        alone = replace(request, arrives=0, generated=[], num_cached=0)
        serve(model(), [alone])
        assert alone.generated == request.generated
