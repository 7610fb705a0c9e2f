# The router, and the orchestrator with `args: [orchestrator]`. No torch. Build from the repository's root:
#   docker build -f k8s/images/router.Dockerfile -t ryzanstein/router:0.1.0 .
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml constraints.txt README.md ./
COPY protos protos
COPY services services
COPY shared shared
COPY clients clients
RUN python -m venv /opt/ryzanstein/venv \
    && RYZANSTEIN_WHEEL_KERNELS=no \
       /opt/ryzanstein/venv/bin/pip install --no-cache-dir --constraint constraints.txt ./clients/python '.[router,redis,tls,oidc]'

FROM python:3.11-slim-bookworm
COPY --from=build /opt/ryzanstein/venv /opt/ryzanstein/venv
ENV PATH=/opt/ryzanstein/venv/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 50051 8000 9090 9091
ENTRYPOINT ["ryzanstein"]
CMD ["router"]
