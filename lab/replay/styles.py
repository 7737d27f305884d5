"""Chat templates in the styles of several families, for the trained backbones' processors."""

from __future__ import annotations

import re
from typing import Any

_CONTENT = (
    "{%- macro said(m) -%}{%- if m.content is string -%}{{ m.content }}{%- else -%}"
    "{%- for part in m.content -%}{%- if part.type == 'image' -%}IMAGE{%- else -%}{{ part.text }}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
_THINKING = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|im_start|>user{%- endif -%}"
    "\n<tool_response>\n{{ said(m) }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}<|im_end|>\n{%- endif -%}"
    "{%- else -%}<|im_start|>{{ m.role }}\n{%- set c = said(m) -%}"
    "{%- if m.role == 'assistant' and '</think>' in c and loop.index0 < ns.last -%}"
    "{%- set c = c.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}{{ c }}"
    "{%- for call in m.tool_calls or [] -%}\n<tool_call>{{ call.function | tojson }}</tool_call>"
    "{%- endfor -%}<|im_end|>\n{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
_HEADERS = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}:\n\n{{ said(m) | trim }}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant:\n\n{%- endif -%}"
)
_MERGED = (
    "{%- set head = said(messages[0]) + '\n\n' if messages[0].role == 'system' else '' -%}"
    "{%- for m in messages -%}{%- if m.role != 'system' -%}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{%- if loop.index0 == 1 -%}{{ head }}{%- endif -%}{{ said(m) | trim }}<|im_end|>\n{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>model\n{%- endif -%}"
)
_PLAIN = (
    "{%- for m in messages -%}{{ m.role | upper }}: {{ said(m) }}\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}ASSISTANT:{%- endif -%}"
)

STYLES: dict[str, str] = {
    "own": "",
    "thinking": _THINKING,
    "headers": _HEADERS,
    "merged": _MERGED,
    "plain": _PLAIN,
}
"""The backbone's own; Qwen3 (strips thinking, joins tool results), Llama 3 (trims), Gemma (the system
prompt in the first turn), and one without special tokens."""


def styled(processor: Any, style: str) -> str:
    """The template of ``style`` with the placeholders that the processor's own template writes."""
    own: str = processor.chat_template
    found = re.search(r"== 'image' -%\}(.*?)\{%-", own)
    assert found, "the testbed's templates write a picture in one place"
    return (_CONTENT.replace("IMAGE", found[1]) + STYLES[style]) if STYLES[style] else own
