"""Settings by the names that TRL, PEFT and transformers give them."""

OUR_NAMES = {
    "dataset_name": "inputs.prompts",
    "lora_alpha": "train.lora.alpha",
    "loss_type": "train.loss",
    "lr_scheduler_type": "train.lr_schedule",
    "max_completion_length": "generate.max_new_tokens",
    "max_length": "train.max_length_tokens",
    "max_prompt_length": "train.max_prompt_tokens",
    "model_name_or_path": "inputs.policy",
    "num_generations": "generate.num_samples",
    "num_train_epochs": "train.epochs",
    "output_dir": "store",
    "per_device_train_batch_size": "train.global_batch_pairs",
    "r": "train.lora.rank",
}
