"""Activations of many runs: tags, conversations, files. Rows B2 to B4 of the specification."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loud
import pytest
import torch
from tokenizers_for_tests import byte_level, gpt2_like

from transformer_lens_lite import ActivationCache, ActivationDataset, ActivationStore
from transformer_lens_lite.activation_store import message_spans, offloaded

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "The cat sat on the mat."},
    {"role": "assistant", "content": "<think>a dog looked at it</think> The cat and the dog."},
    {"role": "user", "content": "  the cat  "},
]


@pytest.fixture
def store() -> ActivationStore:
    """Two participants and three turns each."""
    model, store = loud.build(), ActivationStore()
    for turn in range(3):
        for participant in ("alice", "bob"):
            ids = loud.tokens(2, 4 + turn, seed=turn + 10 * len(participant))
            with model.capture(["resid_post", "z"], store, participant=participant, turn=turn):
                model(ids)
    return store


# --- tags -----------------------------------------------------------------------------------------


def test_B2_values_are_found_by_their_tags(store: ActivationStore) -> None:
    assert len(store) == 6
    assert len(store.query()) == 6 * 6
    assert len(store.query("resid_post")) == 6 * 3
    assert len(store.query("resid_post", participant="bob")) == 3 * 3
    assert len(store.query("z", 1, participant="bob", turn=2)) == 1
    assert store.query("z", 1, participant="carol") == []
    assert store.query("mlp_out") == []
    record = store.query("z", 1, participant="bob", turn=2)[0]
    assert (record.name, record.layer) == ("blocks.1.attn.hook_z", 1)
    assert record.tags == {"participant": "bob", "turn": 2}
    assert record.value is record.cache["z", 1]


def test_B2_the_one_value_that_fits(store: ActivationStore) -> None:
    model = loud.build()
    value = store.at("resid_post", 2, participant="alice", turn=1)
    _, alone = model.run_with_cache(loud.tokens(2, 5, seed=51), names_filter="resid_post")
    torch.testing.assert_close(value, alone["resid_post", 2])
    part = store.at("resid_post", 2, participant="alice", turn=1, span=(1, 3))
    assert torch.equal(part, value[:, 1:3])
    with pytest.raises(KeyError, match="0 values fit 'resid_post', layer 2, participant='carol'"):
        store.at("resid_post", 2, participant="carol")
    with pytest.raises(KeyError, match=r"3 values fit .* they are .*participant='bob', turn=0"):
        store.at("resid_post", 2, participant="bob")
    with pytest.raises(TypeError, match="no run is tagged with 'speaker'.*'participant', 'turn'"):
        store.query(speaker="bob")
    with pytest.raises(TypeError, match="Did you mean 'participant'"):
        store.at("resid_post", 2, participants="bob")
    with pytest.raises(TypeError, match="'layer' is how values are asked for"):
        store.add(ActivationCache({}), layer=3)
    with pytest.raises(TypeError, match="participant= is a tag of what is added to store="):
        loud.build().capture("resid_post", participant="bob").__enter__()


def test_B2_a_failed_run_is_stored_as_far_as_it_got() -> None:
    model, store = loud.build(), ActivationStore()

    def fail(value: Any, hook: Any) -> None:
        raise KeyboardInterrupt

    model.add_hook("blocks.2.hook_resid_pre", fail)
    with pytest.raises(KeyboardInterrupt), model.capture("resid_post", store, turn=0):
        model(loud.tokens())
    assert [record.layer for record in store.query("resid_post", turn=0)] == [0, 1]


def test_B4_a_batch_of_runs_is_copied_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = loud.build(), ActivationStore()
    caches = []
    for length in (3, 4, 3):
        _, cache = model.run_with_cache(
            loud.tokens(2, length, seed=length), names_filter=["hook_tokens", "resid_post"]
        )
        caches.append(cache)
    stacks: list[int] = []
    stack = torch.stack
    monkeypatch.setattr(
        torch, "stack", lambda tensors: stacks.append(len(tensors)) or stack(tensors)
    )
    store.add_batch([(cache, {"run": i}) for i, cache in enumerate(caches)])
    assert sorted(stacks) == [1, 2, 3, 6]  # one per shape and dtype
    for i, cache in enumerate(caches):
        copy = store.runs[i][0]
        assert list(copy) == list(cache)
        for name in cache:
            assert torch.equal(copy[name], cache[name])
            assert copy[name].dtype == cache[name].dtype
            assert copy[name].data_ptr() != cache[name].data_ptr()
        assert torch.equal(copy.tokens, cache.tokens)
    assert offloaded([], "cpu") == []


# --- conversations --------------------------------------------------------------------------------


def test_B3_the_messages_of_a_conversation_are_found_in_its_tokens() -> None:
    tokenizer = gpt2_like()
    tokenizer.chat_template = TEMPLATE
    model = loud.build(tokenizer=tokenizer, n_ctx=128)
    tokens, spans = message_spans(model, CHAT)
    texts = [model.to_string(tokens[0, first:last]) for first, last in spans]
    assert [text.strip() for text in texts] == [message["content"].strip() for message in CHAT]
    store = ActivationStore()
    whole = store.add_conversation(model, CHAT, "resid_post", topic="cats")
    assert torch.equal(whole.tokens, tokens)
    assert len(store) == 3
    assert len(store.query("resid_post", 0, participant="user", topic="cats")) == 2
    first, last = spans[1]
    value = store.at("resid_post", 1, participant="assistant", turn=1)
    assert value.data_ptr() == whole["resid_post", 1][:, first:last].data_ptr()
    reasoning = store.at("resid_post", 1, turn=1, span="reasoning")
    answer = store.at("resid_post", 1, turn=1, span="answer")
    assert torch.equal(torch.cat((reasoning, answer), 1), value)
    cut = reasoning.shape[1]
    assert model.to_string(tokens[0, first : first + cut]).endswith("</think>")
    assert model.to_string(tokens[0, first + cut : last]).startswith(" The cat")
    assert torch.equal(whole.at("resid_post", 1, span="turn 1"), value)
    assert "reasoning" not in store.query("resid_post", 0, turn=0)[0].cache.spans


def test_B3_a_short_message_is_not_found_in_the_words_around_it() -> None:
    tokenizer = gpt2_like()
    tokenizer.chat_template = TEMPLATE
    model = loud.build(tokenizer=tokenizer, n_ctx=128)
    chat = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "a"}]
    tokens, spans = message_spans(model, chat)
    text, _, offsets = model.text.encode_conversation(chat)
    first, last = spans[1]
    assert text[: offsets[first][0]].endswith("<assistant>\n")
    assert model.to_string(tokens[0, first:last]) == "a"


def test_B3_conversations_that_cannot_be_found() -> None:
    model = loud.build(tokenizer=byte_level(), n_ctx=128)
    with pytest.raises(ValueError, match="chat template"):
        ActivationStore().add_conversation(model, CHAT)
    model.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(ValueError, match="message 0 does not stand in what the chat template"):
        ActivationStore().add_conversation(model, CHAT)
    for wrong in ([], [{"role": "user"}], "Hello"):
        with pytest.raises((ValueError, TypeError)):
            ActivationStore().add_conversation(model, wrong)


# --- files ----------------------------------------------------------------------------------------


def test_a_store_is_saved_and_loaded(store: ActivationStore, tmp_path: Path) -> None:
    store.save(tmp_path / "store")
    again = ActivationStore.load(tmp_path / "store")
    assert len(again) == 6
    for record, other in zip(store, again, strict=True):
        assert (record.name, record.tags) == (other.name, other.tags)
        assert torch.equal(record.value, other.value)
    assert torch.equal(
        again.at("z", 0, participant="bob", turn=0, span="prompt"),
        store.at("z", 0, participant="bob", turn=0),
    )
    with pytest.raises(FileExistsError):
        store.save(tmp_path / "store")
    with pytest.raises(FileNotFoundError, match="no folder"):
        ActivationStore.load(tmp_path / "nowhere")
    odd = ActivationStore()
    odd.add(ActivationCache({}), turn=(1, 2))
    with pytest.raises(TypeError, match=r"the tag turn=\(1, 2\) would not come back"):
        odd.save(tmp_path / "odd")
    with pytest.raises(TypeError, match="ActivationCache"):
        odd.add(5, turn=1)
    with pytest.raises(TypeError, match="ActivationStore"):
        loud.build().capture("z", 5).__enter__()
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        ActivationCache({}).save(tmp_path / "no" / "such")
    assert not (tmp_path / "odd").exists()


def texts() -> Iterator[tuple[Any, Any]]:
    for seed in range(3):
        _, ids, mask = loud.ragged([3, 6 - seed, 5], seed=seed)
        yield ids, mask


def test_a_dataset_has_one_row_for_every_real_token(tmp_path: Path) -> None:
    model = loud.build()
    dataset = ActivationDataset(tmp_path)
    kept, ids_kept = [], []
    for ids, mask in texts():
        _, cache = model.run_with_cache(
            ids, attention_mask=mask, names_filter=["resid_post", ("v", 1)]
        )
        dataset.append(cache)
        real = mask.bool()
        kept.append(cache["resid_post", 1][real])
        ids_kept.append(ids[real])
    expected = torch.cat(kept)
    rows = dataset["resid_post", 1]
    assert len(dataset) == len(rows) == len(expected)
    assert rows.shape == (len(expected), 24)
    assert dataset["v", 1].shape == (len(expected), 4, 10)
    assert torch.equal(dataset.tokens[:], torch.cat(ids_kept))
    assert torch.equal(rows[:], expected)
    assert torch.equal(rows[5:25], expected[5:25])
    assert torch.equal(rows[30:4:-3], expected[list(range(len(expected)))[30:4:-3]])
    assert torch.equal(rows[-1], expected[-1])
    shuffled = torch.randperm(len(expected), generator=torch.Generator().manual_seed(0))
    assert torch.equal(rows[shuffled], expected[shuffled])
    assert torch.equal(rows[[3, -2, 17]], expected[[3, -2, 17]])
    assert torch.equal(rows[expected[:, 0] > 0], expected[expected[:, 0] > 0])
    assert rows[4:4].shape == (0, 24)
    with pytest.raises(IndexError):
        rows[len(expected)]
    with pytest.raises(KeyError, match="is not in this dataset.*Did you mean"):
        dataset["resid_pre", 1]


def test_a_harvest_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    model = loud.build()
    straight, interrupted = tmp_path / "a", tmp_path / "b"
    for folder in (straight, interrupted):
        for _ in range(1 if folder is straight else 3):
            dataset = ActivationDataset(folder)
            for ids, mask in list(texts())[dataset.n_appended :]:
                _, cache = model.run_with_cache(ids, attention_mask=mask, names_filter="resid_post")
                dataset.append(cache)
                if folder is interrupted:
                    (folder / "rows-000009.safetensors.7.unfinished").write_bytes(b"cut off")
                    break
    one, two = ActivationDataset(straight), ActivationDataset(interrupted)
    assert one.n_appended == two.n_appended == 3
    assert torch.equal(one["resid_post", 2][:], two["resid_post", 2][:])


def test_what_does_not_fit_into_a_dataset_is_refused_whole(tmp_path: Path) -> None:
    model, ids = loud.build(), loud.tokens(2, 5)
    dataset = ActivationDataset(tmp_path)
    _, cache = model.run_with_cache(ids, names_filter=["resid_post"])
    _, patterns = model.run_with_cache(ids, names_filter=["pattern"])
    with pytest.raises(ValueError, match="does not have its positions on axis 1"):
        dataset.append(patterns)
    dataset.append(cache)
    with pytest.raises(ValueError, match="in this cache or in the dataset, but not in both"):
        dataset.append(model.run_with_cache(ids, names_filter=("resid_post", 1))[1])
    with pytest.raises(ValueError, match="know their tokens"):
        dataset.append(ActivationCache({"hook_embed": torch.zeros(1, 2, 3)}))
    with pytest.raises(TypeError, match="ActivationCache"):
        dataset.append(5)
    other = loud.build(d_model=12)
    _, narrow = other.run_with_cache(ids, names_filter=["resid_post"])
    with pytest.raises(ValueError, match=r"has rows \[12\] of torch.float32, those in .* \[24\]"):
        dataset.append(narrow)
    second = ActivationDataset(tmp_path)
    second.append(cache)
    with pytest.raises(FileExistsError, match="appended by somebody else"):
        dataset.append(cache)
    (tmp_path / "rows-000001.safetensors").unlink()
    assert dataset.n_appended == 1
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "rows-000002.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"has rows-000002.safetensors and no rows-000001"):
        ActivationDataset(tmp_path)
    (tmp_path / "rows-000002.safetensors").rename(tmp_path / "rows-000001.safetensors")
    with pytest.raises(ValueError, match="damaged"):
        ActivationDataset(tmp_path)


def test_a_store_whose_saving_was_interrupted_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loud.build()
    store = ActivationStore()
    for seed in range(3):
        with model.capture("resid_post", store=store, number=seed):
            model(loud.tokens(1, 4))
    save, written = ActivationCache._save, []

    def interrupted(self: Any, path: Path, **how: Any) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(path)
        save(self, path, **how)

    monkeypatch.setattr(ActivationCache, "_save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save(tmp_path / "runs")
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError):
        ActivationStore.load(tmp_path / "runs")
    store.save(tmp_path / "runs")
    assert len(ActivationStore.load(tmp_path / "runs")) == 3
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]
    with pytest.raises(FileExistsError):
        store.save(tmp_path / "runs")
