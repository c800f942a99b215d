# docker build -t imagenet-trainer .
# docker run --rm imagenet-trainer make demo
# mkdir -p runs
# docker run --rm --gpus all --stop-timeout 120 -v /imagenet:/imagenet:ro -v "$PWD/runs:/trainer/runs" \
#     imagenet-trainer python train.py data.root=/imagenet
#
# With several GPUs, add --ipc=host, because NCCL uses /dev/shm, and use torchrun as in README.md. The
# loader does not need it. `docker stop` sends SIGTERM: the run saves a checkpoint within --stop-timeout.

# The libraries of CUDA come with torch; this image tells the container runtime which driver they need.
FROM nvidia/cuda:13.0.3-base-ubuntu24.04

# Triton compiles C code that includes Python.h. The versions are those of Ubuntu 24.04.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=1000 /trainer /trainer/data /trainer/runs

# The user `ubuntu` of the base image. With this uid, it can usually write to mounted folders.
USER 1000
WORKDIR /trainer
# nvJPEG loads libnvcuvid, which belongs to the capability `video`.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility,video \
    PIP_NO_CACHE_DIR=1 \
    PATH=/trainer/.venv/bin:$PATH

# A change of the code does not install the packages again.
COPY --chown=1000 Makefile requirements*.lock ./
COPY --chown=1000 .ci/ .ci/
RUN make env

COPY --chown=1000 . .
CMD ["make", "demo"]
