# For Ascend devices: CANN, torch_npu, and vLLM with its plugin for them. Their versions belong together, and to the
# driver of the host; BASE and VLLM are yours to choose. From the repository's root:
#
#     docker build -f docker/npu.Dockerfile -t verl-sync:npu \
#         --build-arg BASE=quay.io/ascend/cann:TAG --build-arg VLLM="vllm==X vllm-ascend==X" .
#     docker run --rm --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc \
#         -v /usr/local/dcmi:/usr/local/dcmi -v /usr/local/Ascend/driver:/usr/local/Ascend/driver \
#         --shm-size=64g -v "$PWD/runs:/runs" verl-sync:npu
ARG BASE
FROM ${BASE}

ARG VLLM
WORKDIR /opt/verl-sync
COPY . .
# The base has Python, and torch's packages are found there.
RUN python3 -m venv --system-site-packages .venv \
    && .venv/bin/pip install --no-cache-dir ".[npu]" ${VLLM}

RUN useradd --create-home trainer && install -d -o trainer /runs
USER trainer
WORKDIR /runs
ENV PATH=/opt/verl-sync/.venv/bin:$PATH
ENTRYPOINT ["verl-sync"]
CMD ["doctor"]
