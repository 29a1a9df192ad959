"""Which tokens of chats and completions count, against marks that were set by hand."""

import dataclasses
import json
import re

import numpy as np
import pytest
import tokenizers

from experiments import chat, configs, run, tokenizer
from experiments.data import DataConfig, load_corpus, train_iterator, validation_batches
from experiments.errors import UserError
from experiments.sources import Document

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>"]
SPECIAL += ["<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}

CHATML = """
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nBe good.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = """{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if m.content is string %}{{ m.content | trim }}
    {%- else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}
    {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must\n alternate') }}
    {% endif %}
    {% set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{ '<start_of_turn>' + role + '\\n' + m['content'] + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
# Marks its blocks; what it writes at a chat's end differs, so that the other way is out.
MARKED = """{% for m in messages %}
{{ '<s>' + m.role + ':' }}
{%- if m.role == 'assistant' %}
    {%- generation %}
    {%- set ended = '</s>' %}
{{ m.content + ended }}
    {%- endgeneration %}
    {{- ended }}
{%- else %}
{{ m.content }}
{%- endif %}
{% endfor %}
{{- '!' if not add_generation_prompt }}"""


def turns(*contents, system=None):
    head = [{"role": "system", "content": system}] if system is not None else []
    roles = ("user", "assistant")
    return head + [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]


def make(folder, template=None, merges=(), **extra):
    """A tokenizer of bytes and special tokens, with such merges, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(ids, list(merges)))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    model.add_special_tokens(SPECIAL)
    model.save(str(folder / "tokenizer.json"))
    content = CONFIG | ({} if template is None else {"chat_template": template}) | extra
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return tokenizer.load(str(folder))


def document(messages, **fields):
    return Document(b"x", "a.jsonl", 3, chat={"messages": messages, "tools": None} | fields)


def by_hand(marked):
    """(token, whether it counts) of a text where ⟦what counts⟧ is marked; no merges."""
    found, counts = [], False
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    for part in re.split(f"({'|'.join(map(re.escape, SPECIAL))}|[⟦⟧])", marked):
        if part in ("⟦", "⟧"):
            counts = part == "⟦"
        else:
            pieces = (
                [part]
                if part in SPECIAL
                else [*"".join(p for p, _ in level.pre_tokenize_str(part))]
            )
            found += [(piece, counts) for piece in pieces]
    return found


def by_code(folder, encoded):
    """The same of what was encoded."""
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [(model.id_to_token(i), bool(c)) for i, c in zip(encoded.ids, encoded.counted)]


CASES = {
    "chatml": (
        CHATML,
        turns("hi", "yo"),
        "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n⟦yo<|im_end|>\n⟧",
        (4, 3),
    ),
    "chatml, turns": (
        CHATML,
        turns("1", "é😀", "2", "e\u0301", system="S 日"),
        "<|im_start|>system\nS 日<|im_end|>\n<|im_start|>user\n1<|im_end|>\n"
        "<|im_start|>assistant\n⟦é😀<|im_end|>\n⟧<|im_start|>user\n2<|im_end|>\n"
        "<|im_start|>assistant\n⟦e\u0301<|im_end|>\n⟧",
        (8 + 5, 7 + 4),
    ),
    "llama": (
        LLAMA,
        turns([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], " yo ", system="S"),
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nab<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦yo<|eot_id|>⟧",
        (3, 2),
    ),
    "gemma": (
        GEMMA,
        turns("hi", "yo", "so", "no"),
        "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n⟦yo<end_of_turn>\n⟧"
        "<start_of_turn>user\nso<end_of_turn>\n<start_of_turn>model\n⟦no<end_of_turn>\n⟧",
        (8, 6),
    ),
    "the last of two answers": (
        CHATML,
        [*turns("a", system=""), *[{"role": "assistant", "content": c} for c in ("b", "c")]],
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\n⟦b<|im_end|>\n⟧<|im_start|>assistant\n⟦c<|im_end|>\n⟧",
        (6, 4),
    ),
    "generation blocks": (
        MARKED,
        turns("hi", "é", "so", "</s>"),
        "<s>user:hi<s>assistant:⟦é</s>⟧<s>user:so<s>assistant:⟦</s></s>⟧!",
        (5, 2),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_assistant_says_counts(tmp_path, case):
    template, messages, marked, (tokens, size) = CASES[case]
    t = make(tmp_path, template)
    (encoded,) = chat.encode([document(messages)], t)
    assert by_code(tmp_path, encoded) == by_hand(marked)
    assert (encoded.counted.sum(), encoded.bytes) == (tokens, size)
    assert encoded.ids.dtype == np.int32 and encoded.counted.dtype == bool


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_token_counts_where_a_part_of_it_does(tmp_path, template):
    """Merges over a span's border; a space at a span's end, which ByteLevel's offsets trim."""
    merges = [("Ċ", "Ċ"), (":", "!"), ("Ã", "©")]
    (encoded,) = chat.encode([document(turns("é", "\n\n!é "))], make(tmp_path, template, merges))
    found = by_code(tmp_path, encoded)
    begin, end = {CHATML: ("ĊĊ", ["<|im_end|>", "Ċ"]), MARKED: ("Ċ", ["</s>"])}[template]
    said = [begin, "Ċ", "!", "Ã©", "Ġ", *end]
    assert [token for token, counts in found if counts] == said
    uncounted = template == MARKED  # the "!" after it
    assert all(counts for _, counts in found[-len(said) - uncounted : len(found) - uncounted])
    (encoded,) = chat.encode([document(turns("x", "!"))], make(tmp_path, MARKED, merges))
    assert by_code(tmp_path, encoded)[-3:] == [(":!", True), ("</s>", True), ("!", False)]


def test_a_prompt_is_what_the_answer_is_trained_after(tmp_path):
    for template in (CHATML, LLAMA, GEMMA):
        t = make(tmp_path, template)
        messages = turns("hi <|im_end|>", "yo", "é")
        ids = chat.prompt(t, messages)
        (whole,) = chat.encode([document([*messages, *turns("", "x")[1:]])], t)
        assert ids.dtype == np.int32 and ids.tolist() == whole.ids[: len(ids)].tolist()
        assert whole.counted[len(ids) :].all() and not whole.counted[len(ids) - 1]
        assert len(ids) + 3 - (template == LLAMA) == len(whole.ids)
    t = make(tmp_path, MARKED)
    text = "<s>user:hi<s>assistant:yo</s><s>user:é"
    expected = [token for token, _ in by_hand(text)]
    model = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    found = chat.prompt(t, turns("hi", "yo", "é"))
    assert [model.id_to_token(int(i)) for i in found] == expected


def test_a_template_runs_as_transformers_runs_it(tmp_path):
    template = """
    {% for m in messages %}
        {% if m.role == 'system' %}{% continue %}{% endif %}
        {% if loop.index > 2 %}{% break %}{% endif %}
    {% endfor %}
{{ {'<é>': [1, "'"]} | tojson }}{{ tools | tojson(indent=1) }}{{ documents is none }}
{{ bos_token ~ eos_token ~ pad_token ~ add_bos_token }}{{ strftime_now('%Y') | length }}"""
    t = make(tmp_path, template)
    text = t.decode(chat.prompt(t, turns("x"))).rsplit("\n", 1)
    assert text == ["""\n{"<é>": [1, "'"]}nullTrue""", "4"]  # special tokens are left out
    messages = turns("x", "y")
    marked = "{% generation %}{{ tools | tojson }}{% endgeneration %}"
    (encoded,) = chat.encode([document(messages, tools=[{"a": 1}])], make(tmp_path, marked))
    assert by_code(tmp_path, encoded) == by_hand('⟦[{"a": 1}]⟧')


def test_where_a_template_lies(tmp_path):
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": MARKED}]
    plain, listed = make(tmp_path / "a"), make(tmp_path / "b", several)
    assert plain.chat_template is None and listed.chat_template == MARKED
    assert (
        plain.special_tokens == listed.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    )
    assert make(tmp_path / "c", several[:1]).chat_template is None
    (tmp_path / "b" / "special_tokens_map.json").write_text(
        '{"bos_token": "old", "pad_token": {"content": "<pad>"}}'
    )
    (tmp_path / "b" / "chat_template.jinja").write_text(LLAMA)
    both = tokenizer.load(str(tmp_path / "b" / "tokenizer.json"))
    assert both.chat_template == LLAMA
    assert both.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    # A template makes another tokenizer of it, and nothing else beside it does.
    (tmp_path / "a" / "tokenizer_config.json").unlink()
    assert tokenizer.load(str(tmp_path / "a")).fingerprint == plain.fingerprint
    assert len({t.fingerprint for t in (plain, listed, both)}) == 3
    for content in (b"[]", b"{", b"\xff"):
        (tmp_path / "a" / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(UserError, match=r"cannot read .*a/tokenizer_config.json: "):
            tokenizer.load(str(tmp_path / "a"))


def test_a_run_keeps_the_template(tmp_path):
    t = make(tmp_path / "model", LLAMA)
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    options = configs.load("tiny")
    data = dataclasses.replace(options.data, tokenizer=str(tmp_path / "model"))
    options = dataclasses.replace(options, data=data)
    run.write_config(tmp_path / "run", options, t)
    found = run.load_run(tmp_path / "run").tokenizer
    assert found.chat_template == LLAMA and found.fingerprint == t.fingerprint
    assert (tmp_path / "run" / "generation_config.json").read_text() == "{}"
    messages = turns("hi")
    assert chat.prompt(found, messages).tolist() == chat.prompt(t, messages).tolist()
    (tmp_path / "run" / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="is not the one that"):
        run.load_run(tmp_path / "run")


def test_a_completion_counts_and_its_prompt_does_not(tmp_path):
    prompt = "é<s>!"
    pair = Document(f"{prompt}?yo é".encode(), "a.jsonl", 1, prompt=len(prompt.encode()))
    t = make(tmp_path, merges=[("!", "?"), ("Ã", "©")])
    for loaded, said, counts in ((t, "!?yo é", 6), (tokenizer.load("bytes"), "?yo é", 7)):
        (encoded,) = chat.encode([pair], loaded)
        # A special token's name is text; "!?" is one token of t's, and of both parts.
        assert loaded.decode(encoded.ids) == "é<s>!?yo é"
        assert loaded.decode(encoded.ids[encoded.counted]) == said
        assert encoded.counted.sum() == counts and encoded.bytes == 6
        assert (encoded.ids[0], encoded.ids[-1]) == (loaded.bos, loaded.eos)
        assert encoded.counted[-1] and not encoded.counted[0]


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_chats_are_packed_with_other_documents(tmp_path):
    """A chat over two rows, a text and a completion, in rows of 12."""
    t = make(
        tmp_path / "t",
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}"
        "{% endfor %}{{ 'a' if add_generation_prompt }}",
    )
    some = [{"messages": turns("12345678", "é9")}, {"text": "xyz"}]
    source = write(tmp_path / "a.jsonl", *some, {"prompt": "p", "completion": "q"})
    held = write(tmp_path / "v.jsonl", {"prompt": "12", "completion": "é"}, {"text": "ab"})
    options = DataConfig(source=(source,), validation=(held,))
    corpus = load_corpus(options, t)
    ids = lambda text: [int(i) for i in t.encode(text.encode())]
    batches = train_iterator(corpus, batch=1, sequence=12, seed=0)
    rows = sorted((next(batches) for _ in range(2)), key=lambda b: b["documents"].max())
    bos, eos = t.bos, t.eos
    assert rows[0]["tokens"][0].tolist() == [*ids("u12345678aé9")][:12]
    assert rows[0]["labels"][0].tolist() == [-1] * 9 + ids("é9")
    # The next row begins within the chat.
    text = [*ids("9"), bos, *ids("xyz"), eos, bos, *ids("pq"), eos, 0, 0]
    assert rows[1]["tokens"][0].tolist() == text
    assert rows[1]["labels"][0].tolist() == [
        -1, *ids("xyz"), eos, -1, -1, *ids("q"), eos, -1, -1, -1
    ]  # fmt: skip
    assert rows[1]["segments"][0].tolist() == [1, *[2] * 5, *[3] * 4, 0, 0]
    assert corpus.train.predicted == sum(int((b["labels"] >= 0).sum()) for b in rows) == 9
    assert corpus.train.bytes == 3 + 3 + 1
    (batch,) = validation_batches(corpus, batch=1, sequence=20)
    assert corpus.validation.predicted == (batch["labels"] >= 0).sum() == 3 + 3
    assert corpus.bytes_per_token == (2 + 2) / 6
    # The same tokens under another mask are another corpus.
    first = corpus.facts()
    assert first == load_corpus(options, t).facts()
    write(tmp_path / "a.jsonl", *some, {"prompt": "", "completion": "pq"})
    other = load_corpus(options, t)
    assert other.train.tokens == corpus.train.tokens
    assert other.facts() != first


def test_whole_chats_are_held_out(tmp_path):
    t = make(tmp_path / "t", CHATML)
    source = write(tmp_path / "a.jsonl", *({"messages": turns(f"{i}", "x")} for i in range(3)))
    for fraction, sizes in ((1e-6, (2, 1)), (1 - 1e-6, (1, 2))):
        corpus = load_corpus(DataConfig(source=(source,), validation_fraction=fraction), t)
        assert (corpus.train.documents, corpus.validation.documents) == sizes
    write(tmp_path / "a.jsonl", {"messages": turns("1", "x")}, {"messages": turns("1", "x")})
    with pytest.raises(UserError, match=r"holds one chat or completion: .*--data.validation"):
        load_corpus(DataConfig(source=(source,)), t)


USER, SAID = turns("hi", "yo")
BAD = {
    "no template": (None, [USER, SAID], r"a.jsonl:2: tokenizer .* has no chat template: put "),
    "syntax": ("{% if %}", [USER, SAID], r"the chat template of tokenizer .* error in line 1: Exp"),
    "unknown tag": ("\n{% go %}", [USER, SAID], r"error in line 2: Encountered unknown tag 'go'"),
    "raises": (GEMMA, turns("a", "b", system="S"), "a.jsonl:2: .*refuses it: System role not supp"),
    "raises in lines": (GEMMA, [SAID], "a.jsonl:2: .* it: Roles must alternate"),
    "fails": ("{{ messages[9].x.y }}", [USER, SAID], "a.jsonl:2: .* it: .*has no element 9"),
    "reaches out": ("{{ ''.__class__.mro() }}", [USER, SAID], "a.jsonl:2: .* it: .*unsafe"),
    "no answer": (CHATML, [USER], "a.jsonl:2: no message is of the role 'assistant'"),
    "not stable": (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | length }}",
        turns("a", "b", "c", "d"),
        r"a.jsonl:2: message 2: .*\{% generation %\}",
    ),
    "asks otherwise": (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ '?' if add_generation_prompt }}",
        [USER, SAID],
        "a.jsonl:2: message 2: .* begins a chat in another way",
    ),
    "mark": (MARKED, turns("\ufdd0", "x"), r"a.jsonl:2: holds U\+FDD0 or U\+FDD1"),
    "half a pair": (CHATML, turns("\ud83d", "x"), r"a.jsonl:2: holds half .* '\\ud83d'"),
    "no list": (CHATML, "hi", "a.jsonl:2: 'messages' holds no list of {role, content} objects"),
    "empty": (CHATML, [], "a.jsonl:2: 'messages' holds no list of"),
    "no objects": (CHATML, ["hi"], "a.jsonl:2: 'messages' holds no list of"),
    "role": (CHATML, [USER, {"content": "x"}], "2: message 2: its 'role' is None, not a name"),
    "content": (CHATML, [{"role": "user"}, SAID], "2: message 1: its 'content' holds None: legal"),
    "part": (
        CHATML,
        [{"role": "user", "content": [{"type": "image", "url": "x"}]}, SAID],
        r"2: message 1: its 'content' holds \{'type': 'image', 'url': 'x'\}: legal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_chat(tmp_path, case):
    template, messages, message = BAD[case]
    source = write(tmp_path / "a.jsonl", {"text": "x"}, {"messages": messages})
    options = DataConfig(source=(source,), validation=(write(tmp_path / "v.txt", "held"),))
    with pytest.raises(UserError, match=message) as caught:
        load_corpus(options, make(tmp_path / "t", template))
    assert "\n" not in str(caught.value)


def test_bad_record(tmp_path):
    t = tokenizer.load("bytes")
    for record, message in (
        ({"prompt": "a"}, r"a.jsonl:1: no field 'text'; it has: prompt; legal are also 'messages'"),
        ({}, "it has: none; legal"),
        ({"prompt": "a", "completion": 1}, "a.jsonl:1: 'completion' holds int, not text"),
        ({"messages": [USER, SAID], "tools": "x"}, "a.jsonl:1: 'tools' holds no list of objects"),
        ({"messages": [USER, SAID]}, "a.jsonl:1: tokenizer bytes has no chat template"),
    ):
        source = write(tmp_path / "a.jsonl", record)
        with pytest.raises(UserError, match=message):
            load_corpus(DataConfig(source=(source,), validation=(source,)), t)
    nothing = make(tmp_path / "t", "{% generation %}{% endgeneration %}{{ messages }}")
    source = write(tmp_path / "a.jsonl", {"messages": [USER, SAID]})
    with pytest.raises(UserError, match=r"a.jsonl:1, no token counts in the loss"):
        load_corpus(DataConfig(source=(source,), validation=(source,)), nothing)
    pair = write(tmp_path / "b.jsonl", {"prompt": "a", "completion": "\ud83d"})
    with pytest.raises(UserError, match=r"b.jsonl:1: byte 1 is not UTF-8"):
        load_corpus(DataConfig(source=(pair,), validation=(pair,)), nothing)
    with pytest.raises(UserError, match="the chat: message 1: its 'role' is 5"):
        chat.prompt(make(tmp_path / "t", CHATML), [{"role": 5}])
