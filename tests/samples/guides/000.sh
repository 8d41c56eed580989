mkdir -p /data/vayu/train/ray/vayu_cluster/storage
chmod 700 /data/vayu/train/ray/vayu_cluster
ray start --head \
    --port=$RAY_GCS_PORT \
    --dashboard-port=$RAY_DASHBOARD_PORT \
    --ray-client-server-port=$RAY_CLIENT_PORT \
    --temp-dir=/data/vayu/train/ray/vayu_cluster \
    --storage=/data/vayu/train/ray/vayu_cluster/storage \
    --dashboard-host=0.0.0.0 \
    --num-gpus=8 \
    --disable-usage-stats \
    --system-config='{"automatic_object_spilling_enabled":true,"object_spilling_config":{"type":"filesystem","params":{"directory_path":"/data/vayu/train/ray/vayu_cluster/spill"}},"debug_mode":true}' \
    --redis-password="$RAY_PASSWORD"
ray start \
    --address=gpu005:$RAY_GCS_PORT \
    --temp-dir=/data/vayu/train/ray/vayu_cluster \
    --storage=/data/vayu/train/ray/vayu_cluster/storage \
    --num-gpus=8 \
    --redis-password="$RAY_PASSWORD"
python -m openrlhf.models.remote_rm.math_verifier \
    --dataset $DATASET \
    --input_key message \
    --prompt-template chatml \
    --port $REWARD_MODEL_PORT &
curl http://127.0.0.1:$REWARD_MODEL_PORT/health_check
RAY_ADDRESS="http://127.0.0.1:$RAY_DASHBOARD_PORT" ray job submit \
    --working-dir="." \
    -- python3 -m openrlhf.cli.train_ppo_ray \
    --ref_num_nodes $REF_NUM_NODES \
    --ref_num_gpus_per_node $REF_GPUS_PER_NODE \
    --remote_rm_url "http://127.0.0.1:$REWARD_MODEL_PORT/get_reward" \
    --actor_num_nodes $ACTOR_NUM_NODES \
    --actor_num_gpus_per_node $ACTOR_GPUS_PER_NODE \
    --vllm_num_engines $VLLM_NUM_ENGINES \
    --vllm_tensor_parallel_size $VLLM_TP_SIZE \
    --colocate_all_models \
    --vllm_enable_sleep \
    --vllm_gpu_memory_utilization $VLLM_MEM_UTIL \
    --vllm_sync_backend gloo \
    --enable_prefix_caching \
    --pretrain $PRETRAIN \
    --save_path "./ckpts/$MODEL_NAME" \
    --micro_train_batch_size $MICRO_TRAIN_BATCH \
    --train_batch_size $TRAIN_BATCH \
    --micro_rollout_batch_size $MICRO_ROLLOUT_BATCH \
    --rollout_batch_size $ROLLOUT_BATCH \
    --temperature $TEMPERATURE \
    --n_samples_per_prompt $N_SAMPLES_PER_PROMPT \
    --max_epochs $MAX_EPOCHS \
    --num_episodes $NUM_EPISODES \
    --prompt_max_len $PROMPT_MAX_LEN \
    --max_samples $MAX_SAMPLES \
    --generate_max_len $GEN_MAX_LEN \
    --advantage_estimator rloo \
    --zero_stage 3 \
    --adam_offload \
    --bf16 \
    --actor_learning_rate $ACTOR_LR \
    --init_kl_coef $INIT_KL_COEF \
    --prompt_data $DATASET \
    --input_key message \
    --normalize_reward \
    --flash_attn \
    --gradient_checkpointing \
    --save_steps 10 \
    --ckpt_path "./ckpts/$MODEL_NAME/ckpt" \
    --save_hf_ckpt
ps aux | grep "ray:::" | grep "$(whoami)" | grep -v grep | awk '{print $2}' | xargs -r kill -9
ray status --address=gpu005:$RAY_GCS_PORT
tail -f "./ckpts/$MODEL_NAME/logs/*"
chmod 700 /data/vayu/train/ray/vayu_cluster/storage
