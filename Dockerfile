# An image with jaxddp, for CPUs, NVIDIA GPUs or TPUs:
#
#     docker build -t jaxddp .
#     docker build -t jaxddp:cuda12 --build-arg EXTRAS=cuda12,cloud .
#     docker run --rm -v "$PWD:/work" --user "$(id -u)" jaxddp jaxddp train digits --data data/digits
#     docker run --rm --gpus all --shm-size 8g -v /data:/data:ro -v "$PWD:/work" --user "$(id -u)" jaxddp:cuda12 \
#         jaxddp train imagenet_resnet50 --data /data/imagenet
#
# EXTRAS are extras of pyproject.toml, separated by commas. The CUDA libraries come from pip, so both variants have the
# same base image; the host needs only NVIDIA's driver and the NVIDIA Container Toolkit.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG EXTRAS=demo
WORKDIR /source
COPY pyproject.toml constraints.txt README.md ./
COPY configs configs
COPY jaxddp jaxddp
RUN python -m venv /opt/jaxddp \
 && /opt/jaxddp/bin/pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"

FROM ${BASE}
COPY --from=build /opt/jaxddp /opt/jaxddp
# Any user id can run the image: the folder of caches, such as compiled programs, is writable by all.
RUN mkdir -m 1777 /cache
ENV PATH=/opt/jaxddp/bin:$PATH HOME=/cache PYTHONUNBUFFERED=1
USER 1000
WORKDIR /work
# There is no entry point, so `command` means the same in the manifests of launch/ for Kubernetes and for AWS Batch.
CMD ["jaxddp", "--help"]
