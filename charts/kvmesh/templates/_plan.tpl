{{- /* What templates read of the values: defaults filled in, pools found by name, lists with each value once. */ -}}
{{- define "kvmesh.plan" -}}
{{- $ambient := eq .Values.mode "ambient-gateway" -}}
{{- $minor := regexFind "[0-9]+" (trimPrefix "1." .Values.istioVersion) | int -}}
{{- $pools := list -}}
{{- $byName := dict -}}
{{- $ports := list -}}
{{- range .Values.pools -}}
  {{- $port := .port | default 8000 | int -}}
  {{- $podsName := include "kvmesh.fittingName" (dict "format" "kvmesh-%s-pods" "pool" .name) -}}
  {{- $pickerName := include "kvmesh.fittingName" (dict "format" "kvmesh-picker-%s" "pool" .name) -}}
  {{- $names := dict "podsName" $podsName "pickerName" $pickerName -}}
  {{- $pool := merge (dict "port" $port "podPort" (.podPort | default $port)) $names . -}}
  {{- $_ := set $byName (printf "%s/%s" .namespace .name) $pool -}}
  {{- $pools = append $pools $pool -}}
  {{- $ports = append $ports (printf "%05d" $port) -}}
{{- end -}}
{{- $whole := list -}}
{{- $single := list -}}
{{- range .Values.routes -}}
  {{- $name := .pool | default (keys $byName | first) -}}
  {{- $found := get $byName $name -}}
  {{- if not $found -}}
    {{- fail (printf "routes: no pool is called %s" $name) -}}
  {{- end -}}
  {{- $route := merge (dict "pool" $found) . -}}
  {{- if .route -}}
    {{- $single = append $single $route -}}
  {{- else -}}
    {{- $whole = append $whole $route -}}
  {{- end -}}
{{- end -}}
{{- $namespaces := list .Release.Namespace -}}
{{- range $pools -}}
  {{- $namespaces = append $namespaces .namespace -}}
{{- end -}}
{{- $namespaces = uniq $namespaces -}}
{{- $files := list -}}
{{- if .Values.redisPasswordSecret -}}
  {{- $files = append $files "password_file=/etc/kvmesh/redis/password/password" -}}
{{- end -}}
{{- if .Values.redisSentinelPasswordSecret -}}
  {{- $files = append $files "sentinel_password_file=/etc/kvmesh/redis/sentinel/password" -}}
{{- end -}}
{{- if .Values.redisCaSecret -}}
  {{- $files = append $files "ca_file=/etc/kvmesh/redis/ca/ca.crt" -}}
{{- end -}}
{{- if .Values.redisTlsSecret -}}
  {{- $files = append $files "cert_file=/etc/kvmesh/redis/tls/tls.crt&key_file=/etc/kvmesh/redis/tls/tls.key" -}}
{{- end -}}
{{- $redis := .Values.redis | default (printf "redis://kvmesh-redis.%s.svc:6379/0" .Release.Namespace) -}}
{{- if $files -}}
  {{- $redis = printf "%s%s%s" $redis (ternary "&" "?" (contains "?" $redis)) (join "&" $files) -}}
{{- end -}}
redisAddress: {{ $redis | quote }}
minor: {{ $minor }}
buffered: {{ or (eq (.Values.bodyMode | default "") "buffered") (eq .Values.failureMode "FailOpen") }}
membership: {{ .Values.membership | default (ternary "ambient" "sidecar" $ambient) }}
poolsInMesh: {{ ternary (not $ambient) .Values.poolsInMesh (kindIs "invalid" .Values.poolsInMesh) }}
rootNamespace: {{ .Values.rootNamespace | default "istio-system" }}
pools: {{ $pools | toJson }}
routes: {{ concat $whole $single | toJson }}
gateways: {{ include "kvmesh.gateways" . }}
clients: {{ include "kvmesh.clients" . }}
watchedNamespaces: {{ $namespaces | toJson }}
poolNamespaces:
{{- range without $namespaces .Release.Namespace }}
  - namespace: {{ . }}
{{- end }}
poolPorts:
{{- range $ports | uniq | sortAlpha }}
  - port: {{ . | trimAll " " | atoi }}
{{- end }}
gatewayNamespaces:
{{- range include "kvmesh.gateways" . | fromJsonArray | include "kvmesh.namespaces" | fromJsonArray }}
  - namespace: {{ . }}
{{- end }}
clientsNamespaces:
{{- range include "kvmesh.clients" . | fromJsonArray | include "kvmesh.namespaces" | fromJsonArray }}
  - namespace: {{ . }}
{{- end }}
{{- end -}}

{{- /* A Service's name has at most 63 characters. */ -}}
{{- define "kvmesh.fittingName" -}}
{{- $name := printf .format .pool -}}
{{- if gt (len $name) 63 -}}
  {{- $short := regexReplaceAll "-+$" (.pool | trunc 40) "" -}}
  {{- $name = printf .format (printf "%s-%s" $short (sha256sum .pool | trunc 8)) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "kvmesh.gateways" -}}
{{- $gateways := list -}}
{{- range .Values.gateways -}}
  {{- $selector := .selector | default (dict "gateway.networking.k8s.io/gateway-name" .name) -}}
  {{- $account := .serviceAccount | default (ternary .name (printf "%s-istio" .name) (hasKey . "selector")) -}}
  {{- $filled := dict "namespace" .namespace "name" .name "selector" $selector "serviceAccount" $account -}}
  {{- $gateways = append $gateways $filled -}}
{{- end -}}
{{- $gateways | toJson -}}
{{- end -}}

{{- define "kvmesh.clients" -}}
{{- $clients := list -}}
{{- range .Values.clients -}}
  {{- $selector := .selector | default (dict "kvmesh.io/client" "true") -}}
  {{- $clients = append $clients (dict "namespace" .namespace "selector" $selector) -}}
{{- end -}}
{{- $clients | toJson -}}
{{- end -}}

{{- define "kvmesh.namespaces" -}}
{{- $namespaces := list -}}
{{- range . -}}
  {{- $namespaces = append $namespaces .namespace -}}
{{- end -}}
{{- $namespaces | uniq | sortAlpha | toJson -}}
{{- end -}}

{{- define "kvmesh.refuseTwice" -}}
{{- if ne (len (uniq .names)) (len .names) -}}
  {{- fail (printf "%s: one of them is given twice: %s" .what (join ", " .names)) -}}
{{- end -}}
{{- end -}}
