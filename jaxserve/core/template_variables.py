"""The variables of chat templates that clients and the server's defaults may set."""

RESERVED_VARIABLES = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
# Variables of some models' templates that applications set for every model.
OPTIONAL_VARIABLES = frozenset(
    {
        *("enable_thinking", "thinking", "thinking_budget", "thinking_mode", "force_reasoning", "include_reasoning"),
        *("reasoning_effort", "preserve_thinking", "clear_thinking", "keep_all_reasoning", "truncate_history_thinking"),
        *("add_vision_id", "date_string", "current_date", "model_identity"),
        *("builtin_tools", "xml_tools", "python_tools", "tools_in_user_message"),
    }
)


def is_reserved(name: str) -> bool:
    """Return whether a variable is not to be set: one that the server sets, and what is no name of a variable."""
    return name in RESERVED_VARIABLES or "template" in name or not name.isidentifier()
