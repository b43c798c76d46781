"""An attached encoding trains with its model: under Trainer, peft, and gradient checkpointing."""

import pytest
import torch

import posenc
from posenc.hf import attach, load, shape_of
from tests.hf.attachment.models import TOKENS, build


def attached_model(name="fox", family="llama"):
    model = build(family)
    attach(model, posenc.create(name, shape_of(model)))
    return model


@pytest.mark.quick(3)
@pytest.mark.filterwarnings("ignore:.*_checkpointing:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("family", "name"), [("llama", "fox"), ("gpt2", "cope"), ("bert", "t5")])
def test_checkpointed_gradients_are_the_same(family, name, reentrant):
    model = attached_model(name, family).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    embedded = (0.1 * torch.randn(*TOKENS.shape, 32)).requires_grad_()

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        # Both forwards are open when the first is recomputed.
        pairs = ((embedded, mask), (2 * embedded, torch.ones_like(mask)))
        both = [model(inputs_embeds=e, attention_mask=m, labels=TOKENS).loss for e, m in pairs]
        sum(both).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    assert all(name in plain for name, _ in model.named_parameters() if "posenc" in name)
    options = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    again = gradients()
    assert plain.keys() == again.keys()
    for key, gradient in plain.items():
        torch.testing.assert_close(again[key], gradient, rtol=1e-4, atol=1e-6)


def test_an_optimizer_sees_the_parameters_and_moves_them():
    model = attached_model("fox").train()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if "posenc" in n}
    assert before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        if name in before:
            assert not torch.equal(parameter, before[name]), name


def test_trainer_saves_resumes_and_loads(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": t, "labels": t} for t in TOKENS.repeat(8, 1)]

    def train(steps: int, resume: bool) -> torch.nn.Module:
        model = attached_model()
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            learning_rate=1e-2,
        )
        Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
        return model

    at_once = train(4, False)
    again = load(tmp_path / "checkpoint-4")
    resumed = train(6, True)
    with torch.no_grad():
        at_once.eval()
        torch.testing.assert_close(again(TOKENS).logits, at_once(TOKENS).logits)
    gate = "model.posenc_encoding.layers.0.gate.weight"
    start = attached_model().get_parameter(gate)
    assert (at_once.get_parameter(gate) - start).abs().max() > 5e-3
    moved = (resumed.get_parameter(gate) - at_once.get_parameter(gate)).abs().max()
    assert 0 < moved < 0.05  # from where it stood, not from the beginning


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:fan_in_fan_out:UserWarning")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_trains_the_encoding_beside_its_adapters(family, tmp_path):
    peft = pytest.importorskip("peft")
    model = attached_model("fox", family)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, modules_to_save=["posenc_encoding"])
    wrapped = peft.get_peft_model(model, config).train()
    trained = {n for n, p in wrapped.named_parameters() if p.requires_grad}
    assert any("gate" in name for name in trained)
    assert any("lora_A" in name for name in trained)
    before = {n: p.detach().clone() for n, p in wrapped.named_parameters()}
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):  # lora_A moves once lora_B is not zero
        optimizer.zero_grad()
        wrapped(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    moved = {n for n, p in wrapped.named_parameters() if not torch.equal(p, before[n])}
    assert moved == trained
    wrapped.eval().save_pretrained(tmp_path)
    fresh = peft.PeftModel.from_pretrained(attached_model("fox", family), tmp_path).eval()
    with torch.no_grad():
        expected = wrapped(input_ids=TOKENS).logits
        torch.testing.assert_close(fresh(input_ids=TOKENS).logits, expected)
        first = wrapped.generate(
            input_ids=TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0
        )
        second = fresh.generate(
            input_ids=TOKENS, max_new_tokens=4, do_sample=False, use_cache=False, pad_token_id=0
        )
    assert torch.equal(first, second)


def test_autocast_and_bfloat16_train():
    model = attached_model("fox").train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    full = model(TOKENS, labels=TOKENS).loss
    torch.testing.assert_close(loss, full, rtol=0.05, atol=0, check_dtype=False)
    half = attached_model("rope").to(torch.bfloat16)
    assert half(TOKENS).logits.dtype == torch.bfloat16
