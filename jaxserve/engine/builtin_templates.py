"""Chat templates for models that come without one, by the name that `--chat-template` takes."""

from collections.abc import Mapping

PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
{{- message['role'] | capitalize }}: {{ message['content'] }}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

VICUNA = """\
{{- bos_token }}
{%- set default = "A chat between a curious user and an artificial intelligence assistant. \
The assistant gives helpful, detailed, and polite answers to the user's questions." %}
{%- set given = messages and messages[0]['role'] == 'system' %}
{{- messages[0]['content'] if given else default }}{{ ' ' }}
{%- for message in messages[1 if given else 0:] %}
{%- if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}
{%- elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] }}{{ eos_token }}
{%- else %}{{ raise_exception('Vicuna knows the roles user and assistant, and system for the first message') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
"""Vicuna 1.1 to 1.5, as FastChat writes it."""

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

BUILTIN: Mapping[str, str] = {"plain": PLAIN, "vicuna": VICUNA, "chatml": CHATML}
