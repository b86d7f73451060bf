# The server: docker build --build-arg EXTRAS=cuda12 --tag jaxserve:cuda12 .
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
# cpu, cuda12 or tpu, and with commas what else of pyproject.toml: cuda12,ray,otel.
ARG EXTRAS=cpu
WORKDIR /src
COPY . .
# The versions of all that is installed, setuptools of the build included: `make lock` writes them.
ENV PIP_CONSTRAINT=/src/deploy/constraints.txt
RUN python -m venv /opt/jaxserve \
    && /opt/jaxserve/bin/pip install --no-cache-dir ".[${EXTRAS}]"

FROM ${BASE}
LABEL org.opencontainers.image.title="jaxserve" org.opencontainers.image.licenses="Apache-2.0"
# begin: python -m tools.repository
# end
# tini: the first process of a container gets no signal that it does not ask for, and the server
# asks only once it serves. wget: KubeRay's probes call it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home jaxserve \
    && install --directory --owner=10001 /cache
COPY --from=build /opt/jaxserve /opt/jaxserve
WORKDIR /app
COPY serve.py ./
COPY configs configs/
ENV PATH=/opt/jaxserve/bin:$PATH NUMBA_CACHE_DIR=/cache/numba HF_HOME=/cache/huggingface \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 JAXSERVE_URL_FILE=/tmp/jaxserve.url
USER 10001:10001
EXPOSE 8000 50051 9464
# Kubernetes has probes of its own. The server says in that file where it listens, and whether by
# TLS. Its certificate is for others' names.
HEALTHCHECK --start-period=30m --interval=30s --timeout=5s \
    CMD ["sh", "-c", "wget -q -t 1 -O - --no-check-certificate \"$(cat $JAXSERVE_URL_FILE)/health\""]
ENTRYPOINT ["tini", "--", "python", "serve.py"]
# What is given to `docker run` comes instead.
CMD ["--config.server.host=0.0.0.0", "--config.engine.compilation_cache_dir=/cache"]
