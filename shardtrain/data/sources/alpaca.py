"""Alpaca: 52,002 instructions with answers. Its column "text" contains both.

Your own files in this format need only the columns instruction, input (which may be empty or missing) and
output. They work with every data.format.
"""

from __future__ import annotations

from shardtrain.data.sources import Request, Shards, Table, huggingface
from shardtrain.data.sources._hub import HubSet

HUB = HubSet("tatsu-lab/alpaca")

_PROMPT = (
    "{% if input is defined and input %}"
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{{ instruction }}\n\n### Input:\n{{ input }}\n\n### Response:\n"
    "{% else %}"
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{{ instruction }}\n\n### Response:\n"
    "{% endif %}"
)
TEMPLATES = {
    "text": {"text": _PROMPT + "{{ output }}"},
    "prompt_completion": {"prompt": _PROMPT, "completion": "{{ output }}"},
    "chat": {
        "user": "{{ instruction }}{% if input is defined and input %}\n\n{{ input }}{% endif %}",
        "assistant": "{{ output }}",
    },
}
"""For each data.format, the templates of its columns, for rows that do not have them.

The wording and the layout are the same as in the dataset.
"""


def open_source(request: Request) -> Table | Shards:
    """Open it from the hub, or a local copy if ``request.path`` is set; see huggingface.open_source."""
    return huggingface.open_preset(request, HUB)
