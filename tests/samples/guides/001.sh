CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python src/launch_vllm.py \
    --model_path /data/vayu/train/models/xDAN-L1-Qwen25-7B-Instruct \
    --port 8000 \
    --tensor_parallel_size 8
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python src/launch_ref_model.py \
    --model_path /data/vayu/train/models/xDAN-L1-Qwen25-7B-Instruct \
    --port 8001 \
    --tensor_parallel_size 8
./scripts/launch_distributed.sh
curl http://gpu004:8000/health
curl http://gpu008:8001/health
ps aux | grep train_grpo.py
