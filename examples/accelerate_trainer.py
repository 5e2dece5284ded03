"""`transformers.Trainer` over an accelerated model: a callback accelerates it on the first batch.

python examples/accelerate_trainer.py
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

import fuseline


class Accelerate(transformers.TrainerCallback):
    """Finds, proves and swaps before the first step; gives the model back at the end."""

    def __init__(self) -> None:
        self.fast: Any = None

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **given: Any,
    ) -> None:
        model, batches = given["model"], given["train_dataloader"]
        batch = {name: value.to(model.device) for name, value in next(iter(batches)).items()}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bool(args.bf16)):
            self.fast = fuseline.accelerate(model, batch, train=True)
        print(self.fast)

    def on_train_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **given: Any,
    ) -> None:
        print(self.fast.report())
        self.fast.undo()


def make_model() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def make_dataset(rows: int = 16) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(128, (rows, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(folder: str = "accelerate-trainer", steps: int = 4) -> float:
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = transformers.Trainer(
        make_model(), arguments, train_dataset=make_dataset(), callbacks=[Accelerate()]
    )
    return float(trainer.train().training_loss)


if __name__ == "__main__":
    print(main())
