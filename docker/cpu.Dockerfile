# The pinned CPU stack of requirements/, as `make install` makes it. From the repository's root:
#
#     docker build -f docker/cpu.Dockerfile -t verl-sync:cpu .
#     docker run --rm --shm-size=4g -v "$PWD/runs:/runs" verl-sync:cpu
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends libcurl4 libibverbs1 libnuma1 libstdc++6 make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/verl-sync
COPY . .
# Bytecode is written here: whoever runs the image may not write it, and a dozen processes would each compile for
# themselves. Files for other Pythons, which some packages have, do not compile.
RUN make install && rm -rf /root/.cache && (.venv/bin/python -m compileall -q -j 0 .venv/lib verl recipe || true)

RUN useradd --create-home trainer && install -d -o trainer /runs
USER trainer
WORKDIR /runs
ENV PATH=/opt/verl-sync/.venv/bin:$PATH
ENTRYPOINT ["verl-sync"]
CMD ["train"]
