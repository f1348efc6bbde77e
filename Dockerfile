# An image for jobs on Kubernetes or elsewhere, such as those of examples/*.yaml: docker build -t bagua .
FROM python:3.11-slim
WORKDIR /bagua_ref
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt '.[cache]'
