"""Fine-tune a stretched checkpoint at its new length, all weights or low-rank adapters.

Stopping and resuming changes nothing on the CPU; on CUDA gradients may be added in any order.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.command_line.errors import RunFailed
from posenc.files.atomic import write_atomically
from posenc.files.opening import make_subfolder, path_in_folder, read_file_bytes
from posenc.hf import sharding
from posenc.hf.checkpoint.tokenization import Windows
from posenc.hf.chunked_logits import ChunkedLogits
from posenc.hf.lora import add_lora, merge_lora
from posenc.hf.restart_state import (
    Identity,
    discard_damaged_state,
    identity_of_run,
    read_sealed,
    sha256,
    write_sealed,
)
from posenc.hf.teacher import SameWeights, Teacher
from posenc.hf.tune_config import TuneConfig

MASKED_SHARE = 0.15
"""Fraction of tokens that are masked, in tuning and in measuring, as in BERT."""
SAVE_EVERY = 50
"""Steps between two saved states; chosen, not derived."""
MAX_TOKENS_AT_ONCE = 8192
"""Tokens that go through the model together in tuning, or one row where it is longer; chosen."""
STEP_SEED_STRIDE = 1_000_003
"""Distance between the seeds of two runs, above any number of steps: no two share a step's seed."""
MAX_GRADIENT_NORM = 1.0
"""The gradients of all weights are scaled down to this norm; as is usual, not derived."""
TrainedWeights = dict[str, nn.Parameter]
"""The weights that are tuned, by name, in float32."""
TUNING_STATE_FILE = "tune.json"
TUNING_TENSORS_FILE = "tune-{step}.safetensors"
ADAMW_STATE_KEYS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of each weight."""


def tune(
    model: Any,
    windows: Windows,
    train_length: int,
    config: TuneConfig,
    folder: Path,
    progress: Callable[[str, float], None],
    mask_token_id: int | None = None,
    teacher: Teacher | None = None,
    keep_adapter: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train the model in place on the windows, and return the loss of each step in nats.

    Args:
        model: the model, with the rotation for the new length.
        windows: text in windows of the new length.
        train_length: the length in tokens that the model was trained at before.
        config: how to train.
        folder: for the state of restarts.
        progress: called with what is done and the fraction of it that is done, before the first
            step and after each.
        mask_token_id: id of the token that hides tokens, if masked tokens are to be predicted;
            None to predict the next token.
        teacher: gives the original model, if its predictions are to be learned; None to learn
            only from the text.
        keep_adapter: called before adapters are merged into the weights, to save them.

    Raises: ValueError if the folder has the state of another tuning; RunFailed if the loss or a
    gradient is not finite.
    """
    torch.manual_seed(config.seed)
    run_identity = (
        {}
        if sharding.is_sharded(model)
        else identity_of_run(
            model,
            windows,
            tuning=config,
            trained=train_length,
            mask_token=mask_token_id,
            teacher=None if teacher is None else teacher.identity,
        )
    )
    num_parameters = sum(p.numel() for p in model.parameters())
    if config.lora_rank:
        rank = config.lora_rank
        alpha = 2.0 * rank  # chosen, not derived: adapters act at twice their product
        add_lora(model, rank, alpha, only_adapters=config.adapter)
        if isinstance(teacher, SameWeights):
            teacher.keep_trained_weights()
    if config.recompute:
        set_gradient_checkpointing(model, True)
    masters = MasterWeights({n: p for n, p in model.named_parameters() if p.requires_grad})
    groups = sharding.groups_for_optimizer(masters.weights.values())
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    # Parts of weights in several processes are not saved: after an interruption all starts again.
    is_saved = not sharding.is_sharded(model)
    # Layers that are divided leave room for less than what every process keeps of its own rows.
    moves_kept_values = config.recompute and sharding.is_sharded(model)
    losses = restore_tuning(folder, run_identity, masters.weights, optimizer) if is_saved else []
    masters.write_back()
    model.train()
    progress("tuning", len(losses) / config.steps)  # the time of the first step counts from here
    for step in range(len(losses), config.steps):
        # Dropout, too, depends on the step only, so that a restart drops the same numbers.
        torch.manual_seed(config.seed * STEP_SEED_STRIDE + step)
        _set_learning_rate(optimizer, config.rate(num_parameters) * config.schedule(step))
        tokens = step_tokens(windows, train_length, config, step)
        tokens = sharding.rows_of_this_process(tokens)
        loss = 0.0
        for rows in tokens.split(rows_at_once(tokens.shape[1])):
            with sharding.kept_in_main_memory() if moves_kept_values else nullcontext():
                if mask_token_id is None:
                    loss_of_rows = next_token_loss(model, rows, train_length, teacher)
                else:
                    loss_of_rows = masked_token_loss(model, rows, mask_token_id)
            loss_of_rows = loss_of_rows * (len(rows) / len(tokens))
            loss_of_rows.backward()
            masters.take_gradients()
            loss += loss_of_rows.item()
        loss = _take_optimizer_step(loss, masters, optimizer, step)
        losses.append(loss)
        if is_saved and ((step + 1) % SAVE_EVERY == 0 or step + 1 == config.steps):
            save_tuning(folder, run_identity, masters.weights, optimizer, losses)
        progress(f"tuning, loss {losses[-1]:.3f}", (step + 1) / config.steps)
    if config.adapter and sharding.is_first():
        make_subfolder(folder)  # where nothing was saved for a restart, it is not there
    _finish_tuning(model, config, keep_adapter)
    return losses


def _set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group of parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def rows_at_once(length: int) -> int:
    """Return how many rows of `length` tokens go through the model together in tuning. The
    gradients of the parts of a step are added up."""
    return max(1, MAX_TOKENS_AT_ONCE // length)


def _take_optimizer_step(
    loss: float, masters: "MasterWeights", optimizer: torch.optim.Optimizer, step: int
) -> float:
    """Change the weights by one step down their gradients, and return the loss of the step in all
    processes. loss: that of the rows of this process.

    Raises: RunFailed, before any weight changes, if the loss or the gradient is not finite.
    """
    weights = masters.weights.values()
    if sharding.count() > 1:
        mean_loss = torch.tensor(loss)
        sharding.average([mean_loss, *(w.grad for w in weights if w.grad is not None)])
        loss = mean_loss.item()
        norm = sharding.clip_gradients(weights, MAX_GRADIENT_NORM)
    else:
        norm = nn.utils.clip_grad_norm_(weights, MAX_GRADIENT_NORM).item()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise RunFailed(
            f"tuning: the loss is {loss}, its gradient {norm} long at step {step}; lower the "
            "learning rate."
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    masters.write_back()
    return loss


def _finish_tuning(model: Any, config: TuneConfig, keep_adapter: Callable[[], None]) -> None:
    """Turn off training mode and gradient checkpointing, save the adapters if they are asked for,
    and merge them into the weights."""
    model.eval()
    if config.recompute:
        set_gradient_checkpointing(model, False)
    if config.adapter and sharding.is_first():
        keep_adapter()
    if config.lora_rank:
        merge_lora(model)


def set_gradient_checkpointing(model: Any, is_on: bool) -> None:
    """Turn transformers' gradient checkpointing on or off."""
    if not model.supports_gradient_checkpointing:
        raise ValueError(f"--recompute: {type(model).__name__} has no such code in transformers.")
    # The older name warns where there is the newer one.
    has_newer_name = hasattr(model, "activation_checkpointing_enable")
    name_prefix = "activation" if has_newer_name else "gradient"
    getattr(model, f"{name_prefix}_checkpointing_{'enable' if is_on else 'disable'}")()
    if not is_on:
        model.disable_input_require_grads()  # which the other call let embeddings have


def step_tokens(windows: Windows, train_length: int, config: TuneConfig, step: int) -> Tensor:
    """Return the tokens of one step, (rows, length), which depend on the seed and the step only.
    With probability `short_share` the windows are cut into rows of the training length."""
    generator = torch.Generator().manual_seed(config.seed * STEP_SEED_STRIDE + step)
    window_indices = torch.randint(0, len(windows), (config.batch,), generator=generator)
    tokens = windows.tokens[window_indices]
    if float(torch.rand((), generator=generator)) < config.short_share:
        num_pieces = tokens.shape[1] // train_length
        tokens = tokens[:, : num_pieces * train_length].reshape(-1, train_length)
    return tokens


def next_token_loss(
    model: Any, tokens: Tensor, train_length: int, teacher: Teacher | None
) -> Tensor:
    """Return the mean loss in nats of predicting each next token: against the text or, with a
    teacher, up to the training length `train_length` against the teacher's predictions.

    The logits of a chunk of tokens are in memory at once, see `ChunkedLogits`.
    """
    divided = ChunkedLogits(model)
    hidden = divided.hidden_states(tokens)
    tokens = tokens.to(hidden.device)
    num_predicted = tokens.shape[1] - 1
    taught_len = 0 if teacher is None else min(train_length, num_predicted)

    def loss_from_text(logits: Tensor, positions: slice) -> Tensor:
        next_tokens = tokens[:, positions.start + 1 : positions.stop + 1]
        return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten(), reduction="sum")

    loss = divided.sum_over_chunks(hidden, loss_from_text, taught_len, num_predicted)
    if teacher is not None:
        loss = loss + _loss_from_teacher(divided, hidden, tokens[:, :taught_len], teacher)
    return loss / tokens[:, 1:].numel()


def _loss_from_teacher(
    divided: ChunkedLogits, hidden: Tensor, taught_tokens: Tensor, teacher: Teacher
) -> Tensor:
    """Return the sum over the taught tokens of the cross entropy between the teacher's predictions
    and the model's, in nats.

    hidden: hidden states of the model, (rows, length, channels). taught_tokens: the first tokens
    of each row, (rows, taught length).
    """
    with torch.no_grad(), teacher.as_before() as original_model:
        taught_hidden = ChunkedLogits(original_model).hidden_states(taught_tokens)

    def loss_from_teacher(logits: Tensor, positions: slice) -> Tensor:
        with torch.no_grad(), teacher.as_before() as original_model:
            taught_logits = ChunkedLogits(original_model).logits(taught_hidden[:, positions])
            probabilities = taught_logits.float().softmax(-1).to(logits.device)
        return F.cross_entropy(logits.flatten(0, 1), probabilities.flatten(0, 1), reduction="sum")

    return divided.sum_over_chunks(hidden, loss_from_teacher, 0, taught_tokens.shape[1])


def masked_token_loss(model: Any, tokens: Tensor, mask_token_id: int) -> Tensor:
    """Return the mean loss in nats of the tokens that are replaced by `mask_token_id`: about
    MASKED_SHARE of them, and at least one.

    tokens: (rows, length). They determine which ones are replaced, so that a restart masks the
    same.
    """
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    draws = torch.rand(tokens.shape, generator=generator)
    # Of a few tokens none may be drawn, and the mean over none is NaN: the smallest is masked.
    is_masked = (draws < MASKED_SHARE) | (draws == draws.min())
    divided = ChunkedLogits(model)
    hidden = divided.hidden_states(tokens.masked_fill(is_masked, mask_token_id))
    masked_hidden = hidden[is_masked.to(hidden.device)][None]
    targets = tokens[is_masked].to(hidden.device)

    def loss_from_text(logits: Tensor, positions: slice) -> Tensor:
        return F.cross_entropy(logits[0], targets[positions], reduction="sum")

    return divided.sum_over_chunks(masked_hidden, loss_from_text) / len(targets)


def save_tuning(
    folder: Path,
    run_identity: Identity,
    trained_weights: TrainedWeights,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
) -> None:
    """Save the trained weights, the state of the optimizer and the losses so far to `folder`, and
    delete the older state.

    run_identity: hashes of everything that the tuning depends on, as `identity_of_run` returns
    them. They are saved, too, so that no other tuning starts from this state.
    """
    tensors: dict[str, Tensor] = {f"weight/{name}": p for name, p in trained_weights.items()}
    for name, p in trained_weights.items():
        tensors |= {f"{key}/{name}": optimizer.state[p][key] for key in ADAMW_STATE_KEYS}
    tensor_bytes = save({name: t.detach().contiguous().clone() for name, t in tensors.items()})
    path = folder / TUNING_TENSORS_FILE.format(step=len(losses))
    make_subfolder(folder)
    write_atomically(path, tensor_bytes)
    # The JSON is replaced last, so that it never names tensors that are not there.
    record = {"losses": losses, "tensors": path.name, "tensors_sha256": sha256(tensor_bytes)}
    write_sealed(folder / TUNING_STATE_FILE, run_identity, record)
    for old_file in folder.glob(TUNING_TENSORS_FILE.format(step="*")):
        if old_file != path:
            old_file.unlink()


def restore_tuning(
    folder: Path,
    run_identity: Identity,
    trained_weights: TrainedWeights,
    optimizer: torch.optim.Optimizer,
) -> list[float]:
    """Load a saved state into the weights and the optimizer, and return the losses of its steps; []
    if there is no complete state.

    run_identity: as of `save_tuning`.

    Raises: ValueError if the folder has the state of another tuning.
    """
    record = read_sealed(folder / TUNING_STATE_FILE, run_identity)
    if record is None:
        return []
    try:
        tensor_bytes = read_file_bytes(path_in_folder(folder, record["tensors"]), None)
        if sha256(tensor_bytes) != record["tensors_sha256"]:
            raise ValueError(f"{record['tensors']} is not what was written")
        tensors = load(tensor_bytes)
    except (OSError, ValueError, SafetensorError) as error:
        discard_damaged_state(folder / TUNING_STATE_FILE, error)
        return []
    with torch.no_grad():
        for name, p in trained_weights.items():
            p.copy_(tensors[f"weight/{name}"])
            moments = {key: tensors[f"{key}/{name}"] for key in ADAMW_STATE_KEYS}
            # AdamW keeps its count of steps on the CPU.
            optimizer.state[p] = {
                key: moment if key == "step" else moment.to(p.device)
                for key, moment in moments.items()
            }
    return record["losses"]


class MasterWeights:
    """Hold a float32 copy of every trainable weight in half precision, which the optimizer changes:
    a step of a small learning rate is below the last bit of half precision.

    After a step the weight is the copy rounded to the weight's dtype. A weight in float32 is its
    own copy. Gradients are added up in float32.

    Args:
        trainable_parameters: the weights that are tuned, by name.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.1.

    >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> masters = MasterWeights({"weight": weight})
    >>> masters.weights["weight"].data += 0.001  # below the last bit of bfloat16 at 1
    >>> masters.write_back()
    >>> weight.item(), round(masters.weights["weight"].item(), 4)
    (1.0, 1.001)
    """

    def __init__(self, trainable_parameters: Mapping[str, nn.Parameter]) -> None:
        self.trainable_parameters = dict(trainable_parameters)
        self.weights: dict[str, nn.Parameter] = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in trainable_parameters.items()
        }

    def take_gradients(self) -> None:
        """Add the gradients of the weights to those of their copies, and free them."""
        for name, p in self.trainable_parameters.items():
            master = self.weights[name]
            if master is p or p.grad is None:
                continue
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad += p.grad
            p.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the copies to the dtype of the weights, and write them there."""
        for name, p in self.trainable_parameters.items():
            if self.weights[name] is not p:
                p.copy_(self.weights[name])
