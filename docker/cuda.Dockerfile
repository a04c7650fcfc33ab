# For NVIDIA devices: torch and vLLM from PyPI, which bring CUDA's libraries; the base has its compiler, for kernels that
# vLLM builds when it starts. From the repository's root:
#
#     docker build -f docker/cuda.Dockerfile -t verl-sync:cuda .
#     docker run --rm --gpus all --shm-size=64g -v "$PWD/runs:/runs" -v /models:/models -v /data:/data verl-sync:cuda \
#         train actor_rollout_ref.model.path=/models/qwen data.train_files=/data/train.parquet ...
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        libcurl4 libibverbs1 libnuma1 librdmacm1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ARG EXTRAS=cuda,nixl,lora
WORKDIR /opt/verl-sync
COPY . .
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir ".[${EXTRAS}]" \
    && (.venv/bin/python -m compileall -q -j 0 .venv/lib || true)

RUN useradd --create-home trainer && install -d -o trainer /runs
USER trainer
WORKDIR /runs
ENV PATH=/opt/verl-sync/.venv/bin:$PATH
ENTRYPOINT ["verl-sync"]
CMD ["doctor"]
