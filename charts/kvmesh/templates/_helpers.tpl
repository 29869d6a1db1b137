{{- /* Names, labels, and what several files derive from the values. Lists and objects are returned as JSON. */ -}}

{{- /* Metadata of a component's object, which is named after it: (list $ COMPONENT). */ -}}
{{- define "kvmesh.metadata" -}}
{{- $root := first . -}}
{{- $component := last . -}}
name: {{ $component }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  app.kubernetes.io/name: {{ $component }}
  {{- include "kvmesh.labels" $root | nindent 2 }}
{{- end }}

{{- define "kvmesh.labels" -}}
app.kubernetes.io/part-of: kvmesh
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
kvmesh.io/installation: {{ .Release.Namespace | quote }}
{{- end }}

{{- /* The labels that select a component's pods. Never change them: Deployment selectors are immutable. */ -}}
{{- define "kvmesh.podsOf" -}}
app.kubernetes.io/name: {{ . }}
app.kubernetes.io/part-of: kvmesh
{{- end }}

{{- define "kvmesh.pickerHost" -}}
kvmesh-picker.{{ .Release.Namespace }}.svc.cluster.local
{{- end }}

{{- /* Membership of kvmesh's own pods in the mesh: sidecar, ambient or none. */ -}}
{{- define "kvmesh.membership" -}}
{{- .Values.membership | default (ternary "ambient" "sidecar" (eq .Values.mode "ambient-gateway")) -}}
{{- end }}

{{- /* Failing open needs buffered bodies: Envoy cannot take back bytes already streamed. */ -}}
{{- define "kvmesh.bodyMode" -}}
{{- .Values.bodyMode | default (ternary "buffered" "duplex" (eq .Values.failureMode "FailOpen")) -}}
{{- end }}

{{- /* "true" if the vLLM pods speak mTLS, else empty. */ -}}
{{- define "kvmesh.poolsInMesh" -}}
{{- if kindIs "invalid" .Values.poolsInMesh | ternary (ne .Values.mode "ambient-gateway") .Values.poolsInMesh -}}
true
{{- end -}}
{{- end }}

{{- /* The namespaces of the release, for mesh-wide policies, and of the pools. */ -}}
{{- define "kvmesh.namespaces" -}}
{{- $namespaces := list .Release.Namespace -}}
{{- range .Values.pools -}}
  {{- $namespaces = append $namespaces .namespace -}}
{{- end -}}
{{- uniq $namespaces | toJson -}}
{{- end }}

{{- /* The pools with their defaults, identity and DNS name. */ -}}
{{- define "kvmesh.pools" -}}
{{- $pools := list -}}
{{- range .Values.pools -}}
  {{- $port := .port | default 8000 -}}
  {{- $identity := printf "%s/%s" .namespace .name -}}
  {{- $host := printf "%s.%s.svc.cluster.local" .name .namespace -}}
  {{- $defaults := dict "port" $port "podPort" (.podPort | default $port) "identity" $identity "host" $host -}}
  {{- $pools = append $pools (merge $defaults .) -}}
{{- end -}}
{{- toJson $pools -}}
{{- end }}

{{- /* The routes with their pools; those of a host before single routes, which override them. */ -}}
{{- define "kvmesh.routes" -}}
{{- $pools := include "kvmesh.pools" . | fromJsonArray -}}
{{- $hosts := list -}}
{{- $single := list -}}
{{- range $route := .Values.routes -}}
  {{- range $pools -}}
    {{- if eq .identity ($route.pool | default .identity) -}}
      {{- $found := merge (dict "pool" .) $route -}}
      {{- if $route.route -}}
        {{- $single = append $single $found -}}
      {{- else -}}
        {{- $hosts = append $hosts $found -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- concat $hosts $single | toJson -}}
{{- end }}

{{- /* The gateways, or the clients, whose Envoys ask the picker: namespace, name, selector, serviceAccount. */ -}}
{{- define "kvmesh.callers" -}}
{{- $callers := list -}}
{{- if eq .Values.mode "sidecar" -}}
  {{- range .Values.clients -}}
    {{- $selector := .selector | default (dict "kvmesh.io/client" "true") -}}
    {{- $callers = append $callers (dict "namespace" .namespace "name" "clients" "selector" $selector) -}}
  {{- end -}}
{{- else -}}
  {{- range .Values.gateways -}}
    {{- /* Istio's names for the pods and the service account that it makes for a Gateway resource */ -}}
    {{- $selector := .selector | default (dict "gateway.networking.k8s.io/gateway-name" .name) -}}
    {{- $account := .serviceAccount | default (ternary .name (printf "%s-istio" .name) (hasKey . "selector")) -}}
    {{- $callers = append $callers (merge (dict "selector" $selector "serviceAccount" $account) .) -}}
  {{- end -}}
{{- end -}}
{{- toJson $callers -}}
{{- end }}

{{- define "kvmesh.callerNamespaces" -}}
{{- $namespaces := list -}}
{{- range include "kvmesh.callers" . | fromJsonArray -}}
  {{- $namespaces = append $namespaces .namespace -}}
{{- end -}}
{{- uniq $namespaces | sortAlpha | toJson -}}
{{- end }}

{{- /* A Service's name for a pool, at most 63 characters: (list FORMAT POOL), FORMAT like "kvmesh-%s-pods". */ -}}
{{- define "kvmesh.serviceName" -}}
{{- $format := first . -}}
{{- $pool := last . -}}
{{- $name := printf $format $pool -}}
{{- if gt (len $name) 63 -}}
  {{- $short := regexReplaceAll "-+$" (trunc 40 $pool) "" -}}
  {{- $name = printf $format (printf "%s-%s" $short (sha256sum $pool | trunc 8)) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{- /* The namespace whose policies are mesh-wide. */ -}}
{{- define "kvmesh.rootNamespace" -}}
{{- .Values.rootNamespace | default (eq .Values.scope "namespaced" | ternary .Release.Namespace "istio-system") -}}
{{- end }}

{{- /* The minor release of Istio 1.x, 0 if it is none. */ -}}
{{- define "kvmesh.istioMinor" -}}
{{- .Values.istioVersion | default "" | regexFind "^1\\.[0-9]+" | trimPrefix "1." | int -}}
{{- end }}
