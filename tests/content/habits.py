"""Chat templates by their habits with texts and items, for the tokens of Qwen2.5-VL."""

from __future__ import annotations

ITEMS = (
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}"
)
BEGIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
END = "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

HABITS = {
    "trims strings": f"{BEGIN}{{{{ m.content | trim }}}}{{% else %}}{ITEMS}{END}",
    "quotes strings": f"{BEGIN}{{{{ m.content | tojson }}}}{{% else %}}{ITEMS}{END}",
    "strips thoughts": (
        BEGIN + "{% set c = m.content %}{% if '</think>' in c and not loop.last %}"
        "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ c }}{% else %}" + ITEMS + END
    ),
    "wraps results": (
        BEGIN + "{% if m.role == 'tool' %}<r>{{ m.content }}</r>{% else %}{{ m.content }}{% endif %}"
        "{% else %}" + ITEMS + END
    ),
    "asks how a text begins": (
        BEGIN + "{% if m.content.startswith(' ') %}? {% endif %}{{ m.content }}{% else %}" + ITEMS + END
    ),
    "looks for a key": (
        BEGIN + "{{ m.content }}{% else %}{% for c in m.content %}{% if 'image' in c %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}" + END
    ),
    "puts the system's text last": (
        "{% set first = messages[0] %}{% set system = first.role == 'system' and first.content is string %}"
        "{% for m in (messages[1:] if system else messages) %}<|im_start|>{{ m.role }}\n"
        "{% if loop.last and system %}({{ first.content }}){% endif %}"
        "{% if m.content is string %}{{ m.content }}{% else %}" + ITEMS + END
    ),
    "shows strings alone": BEGIN + "{{ m.content }}{% else %}" + ITEMS.replace("{{ c.text }}", "") + END,
    "merges results": (
        "{% for m in messages %}"
        "{% if m.role != 'tool' or loop.first or messages[loop.index0 - 1].role != 'tool' %}"
        "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{% endif %}"
        "{% if m.role == 'tool' %}<r>{% endif %}{% if m.content is string %}{{ m.content }}{% else %}"
        + ITEMS
        + "{% endif %}{% if m.role == 'tool' %}</r>{% endif %}"
        "{% if m.role != 'tool' or loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n"
        "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
"""Each shows pictures among parts, and strings."""
