rm -f ray_utils/ray_head_ip.txt
RANK=0 bash ray_utils/start_ray.sh
RANK=1 bash ray_utils/start_ray.sh
RANK=2 bash ray_utils/start_ray.sh
RANK=3 bash ray_utils/start_ray.sh
bash ray_utils/check_ray.sh 32
bash examples/math/run_main_math_grpo_megatron.sh \
    qwen2.5-1.5b-grpo-megatron
bash examples/math/run_main_math_pipeline_grpo_megatron.sh \
    qwen2.5-1.5b-grpo-megatron-pipeline
