"""The matchers of a request's answers, and the errors for requests whose demands leave no token."""

from jaxserve.core.allowed_tokens import AllowedTokens, AllowedTokensMatcher
from jaxserve.core.errors import GrammarTooComplex, JaxserveError, NonFiniteOutput, RequestError
from jaxserve.core.request import Request, Sequence
from jaxserve.core.structured import NOTHING_LEFT, Matcher


def matchers_of(request: Request, vocab: int) -> list[Matcher | None]:
    """Return the matcher of each of the n answers: of its grammar, its allowed tokens, or both; None for free text."""
    params = request.params
    grammars = [None if request.grammar is None else request.grammar.start() for _ in range(params.n)]
    if params.allowed_token_ids is None:
        return list(grammars)
    assert isinstance(params.allowed_token_ids, AllowedTokens)
    mask = params.allowed_token_ids.mask(vocab)
    return [AllowedTokensMatcher(mask, grammar) for grammar in grammars]


def accepts(matcher: Matcher, token: int) -> bool:
    """Take a sampled token, and return False if it is forbidden, because other parameters left no other one."""
    matcher.accept(token)
    return not matcher.error


def no_token(sequence: Sequence) -> JaxserveError:
    """Return why no token could be sampled: the logits are not finite, or the matcher allows no token."""
    structured, error = sequence.params.structured, "" if sequence.matcher is None else sequence.matcher.error
    if not error or structured is None:
        return NonFiniteOutput("logits")
    if error == NOTHING_LEFT:
        return nothing_allowed(sequence)
    return GrammarTooComplex(f"{structured.name} cannot go on: {error}", field=structured.name)


def nothing_allowed(sequence: Sequence) -> RequestError:
    """Return the error for a request whose parameters contradict each other."""
    params = sequence.params
    names = [] if params.structured is None else [params.structured.name]
    names += [] if params.allowed_token_ids is None else ["allowed_token_ids"]
    allow = "allows" if len(names) == 1 else "together allow"
    message = f"{' and '.join(names)} {allow} no token that bad_words, min_tokens and logit_bias do not forbid"
    return RequestError(message, field=names[0])
