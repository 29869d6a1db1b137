{{- /* The pickers' volume with tokenizer folders, /models. Without it, pickers ask the pods for tokens. */ -}}

{{- define "kvmesh.modelVolume" -}}
{{- if .Values.tokenizersClaim -}}
persistentVolumeClaim: {claimName: {{ .Values.tokenizersClaim | quote }}, readOnly: true}
{{- else if .Values.modelCacheClaim -}}
persistentVolumeClaim: {claimName: {{ .Values.modelCacheClaim | quote }}}
{{- else if .Values.tokenizersImage -}}
image: {reference: {{ .Values.tokenizersImage | quote }}, pullPolicy: IfNotPresent}
{{- else if .Values.fetchModels -}}
emptyDir: {sizeLimit: 2Gi} # on the node's disk: about sixty models of up to 34 MB
{{- end -}}
{{- end }}

{{- /* The init container that fetches models. It always succeeds: if the hub is down, the picker asks the pods. */ -}}
{{- define "kvmesh.fetchModels" -}}
- name: fetch-models
  {{- include "kvmesh.image" . | nindent 2 }}
  command:
    - sh
    - -c
    - |
      {{- .Files.Get "files/fetch_models.sh" | nindent 6 }}
    - fetch-models
  args: [/models, {{ join "," .Values.fetchModels | quote }}, /dev/termination-log]
  env:
    - {name: HF_HOME, value: /tmp/huggingface}
    - {name: HF_HUB_DISABLE_TELEMETRY, value: "1"}
    - {name: HF_HUB_DISABLE_UPDATE_CHECK, value: "1"}
    - {name: HF_HUB_DISABLE_XET, value: "1"} # plain downloads: mirrors and proxies support nothing else
    - {name: NO_COLOR, value: "1"}
    {{- with .Values.hubEndpoint }}
    - {name: HF_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- if .Values.hubTokenSecret }}
    - {name: HF_TOKEN_PATH, value: /run/secrets/kvmesh/hub/token} # a file: an environment is inherited and dumped
    {{- end }}
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {memory: 512Mi}
  securityContext:
    {{- include "kvmesh.lockedDown" . | nindent 4 }}
    {{- if and .Values.runAsUser (eq (include "kvmesh.membership" .) "sidecar") }}
    # Istio's own user: init containers run before the proxy, and traffic of other users is redirected to it and lost
    runAsUser: 1337
    {{- end }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: models, mountPath: /models}
    {{- if .Values.hubTokenSecret }}
    - {name: hub-token, mountPath: /run/secrets/kvmesh/hub, readOnly: true}
    {{- end }}
{{- end }}
