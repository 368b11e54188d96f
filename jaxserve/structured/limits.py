"""Limits of the work that llguidance does for one grammar."""

from llguidance import LLParserLimits

# At most some 10 ms for one token, for which all other answers wait. With llguidance's defaults an ambiguous grammar of
# three lines took 600 ms for one token. Schemas need 0.01 to 0.1 ms, and a list of 10,000 random texts (`MAX_CHOICES`)
# takes 9 ms and a fuel of nearly 100,000 once, at its first character. Compiling is limited by `trial.py`.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=2_000,
    max_items_in_row=1_000,
    verbose_errors=False,
)
