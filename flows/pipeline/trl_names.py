"""Settings by the names that TRL, PEFT and transformers give them."""

OUR_NAMES = {
    "bf16": "train.precision",
    "dataset_name": "inputs.prompts",
    "gradient_accumulation_steps": "train.global_batch_pairs",
    "lora_alpha": "train.lora.alpha",
    "lora_r": "train.lora.rank",
    "loss_type": "train.loss",
    "lr": "train.learning_rate",
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
    "reward_model_path": "inputs.oracle_model",
    "save_steps": "train.checkpoint_every_steps",
}
