{{- /* Access to Redis: its URL, the Secrets that picker and indexer mount, and the users of the bundled Redis. */ -}}

{{- /* The Secret with the passwords of the bundled Redis' users, and their hashes. */ -}}
{{- define "kvmesh.redisUsersSecret" -}}
{{- .Values.redisPasswordSecret | default "kvmesh-redis-users" -}}
{{- end }}

{{- /* Secrets for Redis: the folder of their volume, and the files by the URL's parameters. */ -}}
{{- define "kvmesh.redisSecrets" -}}
{{- $users := include "kvmesh.redisUsersSecret" . -}}
{{- with empty .Values.redis | ternary $users .Values.redisPasswordSecret }}
- {folder: password, secret: {{ . | quote }}, files: {password_file: password}}
{{- end }}
{{- with .Values.redisSentinelPasswordSecret }}
- {folder: sentinel, secret: {{ . | quote }}, files: {sentinel_password_file: password}}
{{- end }}
{{- with .Values.redisCaSecret }}
- {folder: ca, secret: {{ . | quote }}, files: {ca_file: ca.crt}}
{{- end }}
{{- with .Values.redisTlsSecret }}
- {folder: tls, secret: {{ . | quote }}, files: {cert_file: tls.crt, key_file: tls.key}}
{{- end }}
{{- end }}

{{- /* The URL of Redis with the paths of its mounted Secrets: (list $ USER), a user of the bundled Redis. */ -}}
{{- define "kvmesh.redisURL" -}}
{{- $root := first . -}}
{{- $bundled := printf "redis://kvmesh-redis.%s.svc:6379/0?username=%s" $root.Release.Namespace (last .) -}}
{{- $url := $root.Values.redis | default $bundled -}}
{{- range include "kvmesh.redisSecrets" $root | fromYamlArray -}}
  {{- $folder := .folder -}}
  {{- range $parameter, $file := .files -}}
    {{- $separator := contains "?" $url | ternary "&" "?" -}}
    {{- $url = printf "%s%s%s=/etc/kvmesh/redis/%s/%s" $url $separator $parameter $folder $file -}}
  {{- end -}}
{{- end -}}
{{- $url -}}
{{- end }}

{{- define "kvmesh.redisMounts" -}}
{{- range include "kvmesh.redisSecrets" . | fromYamlArray }}
- {name: redis-{{ .folder }}, mountPath: /etc/kvmesh/redis/{{ .folder }}, readOnly: true}
{{- end }}
{{- end }}

{{- /* Of the bundled Redis' users, the password of USER alone: (list $ USER). */ -}}
{{- define "kvmesh.redisVolumes" -}}
{{- $root := first . -}}
{{- $user := last . -}}
{{- range include "kvmesh.redisSecrets" $root | fromYamlArray }}
- name: redis-{{ .folder }}
  secret:
    secretName: {{ .secret | quote }}
    {{- if not $root.Values.redis }}
    items: [{key: {{ $user }}, path: password}]
    {{- end }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- /*
The users of the bundled Redis, a line each. The picker reads the index and shares its own state; its scripts name the
bare prefix as their key. Redis knows the hashes of passwords only; anybody may ask whether it lives.
*/ -}}
{{- define "kvmesh.redisUsers" -}}
{{- $shown := "%R~{kv2}heartbeat %R~{kv2}indexers %R~{kv2}registry %R~{kv2}slots" -}}
{{- $commands := "-@all +@read +@write -@dangerous -@scripting +eval +evalsha +multi +exec +ping +time +info +role" -}}
default off
probe on nopass -@all +ping
picker on #$(PICKER_SHA256) %R~{kv2}* ~{kv2} ~{kv2}picker:* {{ $commands }} +client|tracking
indexer on #$(INDEXER_SHA256) ~{kv2}* {{ $commands }}
dashboards on #$(DASHBOARDS_SHA256) {{ $shown }} -@all +dbsize +get +hgetall +info +ping
{{- end }}
