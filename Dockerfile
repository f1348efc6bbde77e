# An image for jobs on Kubernetes or elsewhere, such as those of examples/*.yaml: docker build -t bagua .
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*
WORKDIR /bagua_ref
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt .
