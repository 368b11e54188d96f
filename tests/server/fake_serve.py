"""`jaxserve serve` with a fake engine, as a program: `python -c PROGRAM options...`."""

PROGRAM = """
import sys
import jaxserve.build
import jaxserve.preparation
from jaxserve.cli import main
from jaxserve.engine import model_tokenizer
from tests.server.fake import FakeClient
jaxserve.build.build = lambda *_, **__: None
jaxserve.build.async_engine = lambda _: FakeClient()
jaxserve.preparation.prepare_in_background = lambda *_: None
model_tokenizer.check_serves_text = lambda *_: None
"""
RUN = """
sys.argv = ["jaxserve", "serve", *sys.argv[1:]]
main.main()
"""
FAKE_SERVE = PROGRAM + RUN
