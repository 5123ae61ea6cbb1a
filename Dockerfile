# One image for the CPU and for NVIDIA GPUs. torch brings the CUDA libraries; the host needs the driver.
# BuildKit (Docker 23 and newer) or buildah builds it. docs/clusters.md tells its size.
#
#   docker build -t IMAGE .
#   docker run IMAGE                                 # an offline demo on the CPU
#   docker run --gpus all --shm-size 8g --stop-timeout 300 -v "$PWD/outputs:/workspace/outputs" -v cache:/cache \
#       IMAGE accelerate launch templates/pretrain.py --output_dir outputs/first
#
# --shm-size: data loading processes and NCCL use /dev/shm, 64 MB by default.
# --stop-timeout: seconds that `docker stop` leaves for the last checkpoint, 10 by default. Exit code 143: it was written.
# --user "$(id -u):$(id -g)": when a mounted folder does not belong to user 1000.

# Any Debian with Python 3.11 or newer and its venv module, without a user 1000. To build on the very same one again, name
# its digest: --build-arg BASE_IMAGE=python@sha256:... (`docker buildx imagetools inspect python:3.11-slim-bookworm`).
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

# torch.compile needs a compiler (260 MB): --build-arg EXTRA_PACKAGES=g++ (with Debian's own Python also python3-dev).
ARG EXTRA_PACKAGES=""
# Not pinned: Debian's mirrors drop old versions, so a pin soon fails to build.
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends tini ${EXTRA_PACKAGES} \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/*

# Writable for every user, like /tmp: --user may name any.
RUN groupadd --gid 1000 trainer \
    && useradd --uid 1000 --gid 1000 --home-dir /cache --no-create-home --shell /bin/bash trainer \
    && install -d -m 1777 /cache /workspace/outputs

WORKDIR /workspace

# Dependencies come before the source, so a change of the source installs nothing again.
# A virtual environment, because Debian's own Python refuses pip.
ENV PATH=/opt/venv/bin:${PATH}
# More packages: --build-arg EXTRA_REQUIREMENTS="deepspeed==0.19.8"
ARG EXTRA_REQUIREMENTS=""
# Another build of torch, as that for the CPU alone: --build-arg TORCH_INDEX=, an index of packages that has it.
ARG TORCH_INDEX=""
# A mirror of PyPI, for pip to read: --build-arg PIP_INDEX_URL=https://... (without a password: the image keeps it).
ARG PIP_INDEX_URL
COPY requirements.* ./
# The lock, if there is one, has a hash for each package. It holds PyPI's build of torch. To save space, packages lose
# their tests, and on the CPU alone bitsandbytes its libraries for GPUs.
# hadolint ignore=SC2086
RUN python3 -m venv /opt/venv \
    && grep -v '^-e' requirements.txt > /tmp/all.txt \
    && grep -E '^torch(vision)?==' requirements.txt > /tmp/torch.txt \
    && if [ -n "${TORCH_INDEX}" ]; then pip install --no-cache-dir --no-deps -i "${TORCH_INDEX}" -r /tmp/torch.txt; \
    elif [ -f requirements.lock ]; then pip install --no-cache-dir --require-hashes -r requirements.lock; fi \
    && pip install --no-cache-dir -r /tmp/all.txt ${EXTRA_REQUIREMENTS} \
    && find /opt/venv/lib -type d \( -name tests -o -path '*/torch/test' \) ! -path '*/numpy/*' ! -path '*/mpmath/*' \
    -prune -exec rm -r {} + \
    && if [ -n "${TORCH_INDEX}" ] && python -c 'import torch.version as v; exit(bool(v.cuda or v.hip))'; then \
    rm -f /opt/venv/lib/python*/site-packages/bitsandbytes/lib*[0-9].so; fi \
    && rm /tmp/*.txt

# Kernels that pack recurrent layers (docs/data/chats.md), compiled for this torch: --build-arg EXTRA_PACKAGES=g++
# --build-arg KERNELS="causal-conv1d==1.7.0 flash-linear-attention==0.6.0". The compiler comes from PyPI, all parts of one
# version: that of torch's CUDA libraries. They lack a name that linkers look for.
ARG KERNELS=""
# hadolint ignore=DL3013,SC2086
RUN if [ -n "${KERNELS}" ]; then \
    cuda=$(python -c 'import torch; print(torch.version.cuda)') \
    && pip install --no-cache-dir setuptools wheel ninja \
    "nvidia-cuda-nvcc==${cuda}.*" "nvidia-cuda-crt==${cuda}.*" "nvidia-nvvm==${cuda}.*" \
    && CUDA_HOME=$(echo /opt/venv/lib/python3*/site-packages/nvidia/cu13) \
    && ln -s libcudart.so.13 "${CUDA_HOME}/lib/libcudart.so" \
    && export CUDA_HOME \
    && pip install --no-cache-dir --no-build-isolation ${KERNELS}; fi

# In place of `-e .` in requirements.txt.
ENV PYTHONPATH=/workspace
# The user below must be able to read everything, also files of a strict umask.
COPY --chmod=755 accelerate_configs accelerate_configs
COPY --chmod=755 shared shared
COPY --chmod=755 templates templates
COPY --chmod=755 tools tools

# All caches in one place. USER: torch asks for a name, and a --user that is not in /etc/passwd has none.
ENV HF_HOME=/cache/huggingface \
    TEMPLATES_CACHE=/cache/templates \
    WANDB_CACHE_DIR=/cache/wandb \
    WANDB_CONFIG_DIR=/cache/wandb \
    WANDB_DATA_DIR=/cache/wandb \
    XDG_CACHE_HOME=/cache \
    HOME=/cache \
    USER=trainer \
    PYTHONUNBUFFERED=1
# Besides /tmp, nothing else is written: docker run --read-only --tmpfs /tmp works.
VOLUME ["/workspace/outputs", "/cache"]
USER 1000:1000

# `run` passes `docker stop` on to the training and waits for its checkpoint. `accelerate launch` alone would die of the
# signal at once, and end the container before the checkpoint is written.
ENTRYPOINT ["tini", "--", "python", "-m", "shared", "run"]
CMD ["accelerate", "launch", "templates/lora_finetune.py"]
