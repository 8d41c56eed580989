"""A GRPO script as in TRL's documentation. It is read, never executed."""

raise RuntimeError("this script must not run")

OUTPUT = "runs/grpo"
dataset = load_dataset("trl-lib/DeepMath-103K", split="train")  # noqa: F821

training_args = GRPOConfig(  # noqa: F821
    output_dir=OUTPUT,
    learning_rate=1e-5,
    num_generations=8,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    steps_per_generation=8,
    max_completion_length=1024,
    beta=0.04,
    use_vllm=True,
    vllm_gpu_memory_utilization=0.5,
    logging_steps=1,
    save_steps=100,
    warmup_steps=20,
    report_to=["wandb"],
    bf16=True,
    seed=int("3"),
)
trainer = trl.GRPOTrainer(  # noqa: F821
    "Qwen/Qwen2.5-0.5B-Instruct",
    [accuracy_reward, format_reward],  # noqa: F821
    training_args,
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]),  # noqa: F821
)
