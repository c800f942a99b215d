# docker build -t imagenet-trainer .
# docker run --rm imagenet-trainer make demo
# mkdir -p runs
# docker run --rm --gpus all --stop-timeout 120 -v /imagenet:/imagenet:ro -v "$PWD/runs:/trainer/runs" \
#     imagenet-trainer python train.py data.root=/imagenet
#
# With several GPUs, add --ipc=host, because NCCL uses /dev/shm, and use torchrun as shown in README.md. The
# loader does not need it. On SIGTERM from `docker stop`, the run saves a checkpoint within --stop-timeout.

# torch includes the CUDA libraries; this image tells the container runtime which driver they need.
FROM nvidia/cuda:13.0.3-base-ubuntu24.04

# Triton compiles C code that includes Python.h. Package versions are fixed by Ubuntu 24.04.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=1000 /trainer /trainer/data /trainer/runs

# User `ubuntu` of the base image, whose UID can usually write to mounted directories.
USER 1000
WORKDIR /trainer
# nvJPEG loads libnvcuvid, which requires the capability `video`.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility,video \
    PIP_NO_CACHE_DIR=1 \
    PATH=/trainer/.venv/bin:$PATH

# Install packages in a separate layer, so that code changes do not install them again.
COPY --chown=1000 Makefile requirements*.lock ./
COPY --chown=1000 .ci/ .ci/
RUN make env

COPY --chown=1000 . .
CMD ["make", "demo"]
