{{- /*
Parts of the workloads of picker, indexer and Redis. A workload is
(dict "root" $ "component" COMPONENT "values" SECTION "graceSeconds" SECONDS "apiToken" BOOL).
*/ -}}

{{- /* A ServiceAccount, whose token is mounted only if the pod asks for it. */ -}}
{{- define "kvmesh.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "kvmesh.metadata" (list .root .component) | nindent 2 }}
  {{- with .values.serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{- define "kvmesh.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "kvmesh.metadata" (list .root .component) | nindent 2 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "kvmesh.podsOf" .component | nindent 6 }}
{{- end }}

{{- define "kvmesh.podMetadata" -}}
{{- $sidecar := eq (include "kvmesh.membership" .root) "sidecar" -}}
labels:
  {{- include "kvmesh.podsOf" .component | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  sidecar.istio.io/inject: "{{ $sidecar }}"
  {{- if not $sidecar }}
  istio.io/dataplane-mode: {{ include "kvmesh.membership" .root }}
  {{- end }}
  {{- with .root.Values.istioRevision }}
  istio.io/rev: {{ . | quote }}
  {{- end }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if or $sidecar .values.podAnnotations }}
annotations:
  {{- if $sidecar }}
  # the proxy starts before the first connection and ends after the last
  proxy.istio.io/config: >-
    {holdApplicationUntilProxyStarts: true, terminationDrainDuration: {{ .graceSeconds }}s}
  {{- end }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* A pod's spec except its containers and volumes. */ -}}
{{- define "kvmesh.podSpec" -}}
serviceAccountName: {{ .component }}
automountServiceAccountToken: {{ .apiToken }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .graceSeconds }}
securityContext:
  runAsNonRoot: true
  {{- if .root.Values.runAsUser }}
  runAsUser: 65532 # the image's user; outside the host's range
  runAsGroup: 65532
  fsGroup: 65532
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
  {{- if .values.topologySpreadConstraints }}
  {{- toYaml .values.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway # a single node must be enough
    labelSelector:
      matchLabels:
        {{- include "kvmesh.podsOf" $.component | nindent 8 }}
  {{- end }}
  {{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" }}
{{- with get $.values $field }}
{{ dict $field . | toYaml }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Security context of all containers: pod security standard `restricted`. */ -}}
{{- define "kvmesh.lockedDown" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Image and pull policy of picker and indexer. */ -}}
{{- define "kvmesh.image" -}}
{{- include "kvmesh.imageFields" (list .Values.image .Chart.AppVersion .Values.imagePullPolicy) -}}
{{- end }}

{{- /* Image and pull policy; IMAGE is text or {repository, tag, digest, pullPolicy}: (list IMAGE TAG PULLPOLICY). */ -}}
{{- define "kvmesh.imageFields" -}}
{{- $image := first . -}}
{{- $pullPolicy := last . -}}
{{- if kindIs "map" $image -}}
  {{- $pullPolicy = $image.pullPolicy | default $pullPolicy -}}
  {{- $reference := $image.repository -}}
  {{- with $image.tag | default (empty $image.digest | ternary (index . 1) "") -}}
    {{- $reference = printf "%s:%s" $reference . -}}
  {{- end -}}
  {{- with $image.digest -}}
    {{- $reference = printf "%s@%s" $reference . -}}
  {{- end -}}
  {{- $image = $reference -}}
{{- end -}}
image: {{ $image | quote }}
{{- with $pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{- /* Loading tokenizers may take up to two minutes at the start; liveness is patient. */ -}}
{{- define "kvmesh.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: http-admin}
  periodSeconds: 2
  failureThreshold: 60
readinessProbe:
  httpGet: {path: /readyz, port: http-admin}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 3
livenessProbe:
  httpGet: {path: /healthz, port: http-admin}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{- /* The identity that a pod has as the holder of leases. */ -}}
{{- define "kvmesh.identityEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {apiVersion: v1, fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {apiVersion: v1, fieldPath: metadata.namespace}}
{{- end }}

{{- /* Settings of both picker and indexer: (list $ REDIS-USER). */ -}}
{{- define "kvmesh.sharedEnv" -}}
{{- $root := first . -}}
- {name: KVMESH_KUBERNETES, value: "true"}
- {name: KVMESH_REDIS, value: {{ include "kvmesh.redisURL" . | quote }}}
- {name: KVMESH_HASH_SEED, value: {{ $root.Values.hashSeed | quote }}}
- {name: KVMESH_LOG_FORMAT, value: {{ $root.Values.logFormat }}}
- {name: KVMESH_LOG_LEVEL, value: {{ $root.Values.logLevel }}}
- {name: KVMESH_ADMIN_TOKEN_FILE, value: /etc/kvmesh/admin/token}
- {name: KVMESH_TOKEN_FILE, value: /etc/kvmesh/admin/token} # for clients: `kubectl exec … -- kvmesh doctor`
{{- if eq $root.Values.scope "namespaced" }}
- {name: KVMESH_NAMESPACES, value: {{ include "kvmesh.namespaces" $root | fromJsonArray | join "," | quote }}}
{{- end }}
{{- if $root.Values.podKeySecret }}
- {name: KVMESH_POD_KEY_FILE, value: /etc/kvmesh/pods/key}
{{- end }}
{{- end }}

{{- /* Whole Secrets, not single files (subPath), so that renewals arrive. */ -}}
{{- define "kvmesh.sharedMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: admin-token, mountPath: /etc/kvmesh/admin, readOnly: true}
{{- include "kvmesh.redisMounts" . }}
{{- if .Values.podKeySecret }}
- {name: pod-key, mountPath: /etc/kvmesh/pods, readOnly: true}
{{- end }}
{{- end }}

{{- /* (list $ REDIS-USER) */ -}}
{{- define "kvmesh.sharedVolumes" -}}
{{- $root := first . -}}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
- name: admin-token
  secret:
    secretName: {{ $root.Values.adminTokenSecret | default "kvmesh-admin-token" | quote }}
    defaultMode: 0440
    optional: true # without it the pods run, but the admin pages are closed
{{- include "kvmesh.redisVolumes" . }}
{{- with $root.Values.podKeySecret }}
- name: pod-key
  secret:
    secretName: {{ . | quote }}
    items: [{key: {{ $root.Values.podKeySecretKey | quote }}, path: key}] # no other key of the Secret
    defaultMode: 0440
{{- end }}
{{- end }}
