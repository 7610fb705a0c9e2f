# One node with all its ranks, and the demo model. Build from the repository's root, for CPUs or for CUDA 13:
#   docker build -f k8s/images/worker.Dockerfile -t ryzanstein/worker:0.1.0-cpu .
#   docker build -f k8s/images/worker.Dockerfile -t ryzanstein/worker:0.1.0-cu130 --build-arg TORCH_BUILD=cu130 .
FROM python:3.11-slim-bookworm AS build
ARG TORCH_BUILD=cpu
# The kernels are compiled here, one library per level of CPU: ranks need no compiler (docs/internals/kernels.md).
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml constraints.txt README.md ./
COPY protos protos
COPY services services
COPY shared shared
COPY clients clients
RUN python -m venv /opt/ryzanstein/venv \
    && /opt/ryzanstein/venv/bin/pip install --no-cache-dir --constraint constraints.txt \
       --extra-index-url "https://download.pytorch.org/whl/${TORCH_BUILD}" \
       "torch==2.13.0+${TORCH_BUILD}" ./clients/python '.[worker,tls]'

FROM python:3.11-slim-bookworm
COPY --from=build /opt/ryzanstein/venv /opt/ryzanstein/venv
# Readable by the user below, whatever umask the repository was cloned with.
COPY --chmod=0755 shared/ryzanstein/demo/*.json shared/ryzanstein/demo/*.safetensors /opt/ryzanstein/demo/
ENV PATH=/opt/ryzanstein/venv/bin:$PATH HOME=/tmp LOGNAME=ryzanstein PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 50061 9090 9091
ENTRYPOINT ["ryzanstein"]
CMD ["worker"]
