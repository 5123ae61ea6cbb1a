# One image for every template, on the CPU or on NVIDIA GPUs: torch brings its CUDA libraries, the host its driver.
#
#   docker build -t templates .
#   docker run templates                             # the LoRA template's offline demo
#   docker run templates selftest                    # does training work here? a table
#   docker run --gpus all --shm-size 8g --stop-timeout 300 -v "$PWD/outputs:/workspace/outputs" -v templates-cache:/cache \
#       templates accelerate launch templates/pretrain.py --output_dir outputs/first
#
# --shm-size: batches from reading processes and NCCL go through /dev/shm, 64 MB by default.
# --stop-timeout: seconds that `docker stop` leaves for the last checkpoint, 10 by default; exit code 143 says it was made.
# --user "$(id -u):$(id -g)", where a mounted folder belongs to another user than 1000.

# Any Debian with Python 3.11 or newer, its venv module and no user 1000 of its own.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

# torch.compile needs a compiler, 260 MB that most runs never use: --build-arg EXTRA_PACKAGES=g++
# (and python3-dev where Python is the one of Debian).
ARG EXTRA_PACKAGES=""
# Versions are left to the release: Debian's mirrors drop the old ones, so a pin soon fails to build.
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends tini ${EXTRA_PACKAGES} \
    && rm -rf /var/lib/apt/lists/*

# Open to all, like /tmp: --user may name anyone.
RUN groupadd --gid 1000 trainer \
    && useradd --uid 1000 --gid 1000 --home-dir /cache --no-create-home --shell /bin/bash trainer \
    && install -d -m 1777 /cache /workspace/outputs

WORKDIR /workspace

# Dependencies come before the source: a change of source installs nothing again.
# A virtual environment, because a distribution's own Python refuses pip.
ENV PATH=/opt/venv/bin:${PATH}
# More of them: --build-arg EXTRA_REQUIREMENTS="deepspeed==0.19.8 torchao==0.18.0"
ARG EXTRA_REQUIREMENTS=""
COPY requirements.txt ./
# hadolint ignore=SC2086
RUN grep -v '^-e' requirements.txt > /tmp/dependencies.txt \
    && python3 -m venv /opt/venv \
    && pip install --no-cache-dir -r /tmp/dependencies.txt ${EXTRA_REQUIREMENTS} \
    && rm /tmp/dependencies.txt

# Stands for the `-e .` of requirements.txt, without a build.
ENV PYTHONPATH=/workspace
COPY accelerate_configs accelerate_configs
COPY shared shared
COPY templates templates
# A checkout under a strict umask is not readable by the user below; safetensors writes its files as 0600.
RUN chmod -R a+rX .

# HOME and XDG_CACHE_HOME gather what every other library keeps (W&B, matplotlib, Triton) in the same place.
# USER: torch asks for a name, and a --user without an entry in /etc/passwd has none.
ENV HF_HOME=/cache/huggingface \
    TEMPLATES_CACHE=/cache/templates \
    WANDB_CACHE_DIR=/cache/wandb \
    WANDB_CONFIG_DIR=/cache/wandb \
    WANDB_DATA_DIR=/cache/wandb \
    XDG_CACHE_HOME=/cache \
    HOME=/cache \
    USER=trainer \
    PYTHONUNBUFFERED=1
# All that is written, besides /tmp: the rest may be read-only (docker run --read-only --tmpfs /tmp).
VOLUME ["/workspace/outputs", "/cache"]
USER 1000:1000

ARG BASE_IMAGE
ARG REVISION=""
LABEL org.opencontainers.image.title="accelerate-training-templates" \
      org.opencontainers.image.description="Training scripts to run, read and copy, on Hugging Face Accelerate" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      org.opencontainers.image.revision="${REVISION}"

# A stop has to reach the training process, and the container has to outlive it: `accelerate launch` with one process
# passes no signal on and dies of it at once, which would end the container before the checkpoint is written.
ENTRYPOINT ["tini", "--", "python", "-m", "shared", "run"]
CMD ["accelerate", "launch", "templates/lora_finetune.py"]
