# The image of kvmesh: one for all roles (`extproc`, `indexer`, `sim`, `doctor`, …), the role is the first argument.
#
#   docker build --tag kvmesh:0.1.0 \
#     --build-arg PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm@sha256:… .
#
# Pinned by hash: every Python package, by requirements-image.lock (pip refuses a file whose SHA-256 is not in it). The
# base image, by the digest that the build is given: look it up once with `docker buildx imagetools inspect
# python:3.11-slim-bookworm`, write it into your pipeline, and renew it there. The default is the tag alone, which moves.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
RUN python -m venv /opt/kvmesh
COPY requirements-image.lock ./
# wheels only: nothing of what is installed runs while it is installed
RUN /opt/kvmesh/bin/pip install --require-hashes --only-binary :all: --requirement requirements-image.lock
COPY pyproject.toml README.md LICENSE ./
COPY envoy ./envoy
COPY manifests/crds ./manifests/crds
COPY manifests/monitoring ./manifests/monitoring
COPY kvmesh ./kvmesh
COPY kv_indexer ./kv_indexer
COPY podsim ./podsim
COPY operate ./operate
COPY extproc ./extproc
RUN /opt/kvmesh/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/kvmesh/bin/pip install --no-deps --no-index --find-links /wheels kvmesh \
    && /opt/kvmesh/bin/python -m compileall -q /opt/kvmesh/lib \
    && /opt/kvmesh/bin/kvmesh version

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="kvmesh" \
    org.opencontainers.image.description="Prefix-cache-aware routing of LLM requests for vLLM behind Envoy and Istio" \
    org.opencontainers.image.licenses="Apache-2.0"
# the file system may be read-only: nothing is written but to /tmp
ENV PATH=/opt/kvmesh/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp
COPY --from=build /opt/kvmesh /opt/kvmesh
# of nobody on the host; Kubernetes accepts only a number as proof that it is not root
USER 65532:65532
WORKDIR /tmp
EXPOSE 9002 9090 9091
ENTRYPOINT ["kvmesh"]
CMD ["--help"]
