{{/* Names, labels and images. */}}

{{- define "paceline.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name = contains $chart .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $chart) -}}
{{- end -}}
{{- /* A pool's name is put behind it, and a Service's name has 63 characters at most. */ -}}
{{- if gt (len $name) 32 -}}
{{- printf "%s-%s" ($name | trunc 25 | trimSuffix "-") ($name | sha256sum | trunc 6) -}}
{{- else -}}
{{- $name | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that never change, for selectors. Takes root and component, and pool where there is one. */}}
{{- define "paceline.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
paceline/pool: {{ .name | quote }}
{{- end }}
{{- end -}}

{{/* All labels of an object; takes what paceline.selector takes. */}}
{{- define "paceline.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" | quote }}
{{ include "paceline.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: paceline
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
Labels of pods: none that changes with the chart's version, which would restart pods for nothing.
Takes what paceline.selector takes, and workload, whose podLabels win.
*/}}
{{- define "paceline.podLabels" -}}
{{ include "paceline.selector" . }}
app.kubernetes.io/part-of: paceline
{{- with merge (deepCopy (default dict (default dict .workload).podLabels)) .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Reference of one of Paceline's images. Takes root, service, and override: the pool's own parts. */}}
{{- define "paceline.image" -}}
{{- $common := .root.Values.images -}}
{{- $image := mergeOverwrite (deepCopy (index $common .service)) (default dict .override) -}}
{{- $tag := coalesce $image.tag $common.tag .root.Chart.AppVersion -}}
{{- with $common.registry }}{{ trimSuffix "/" . }}/{{ end }}
{{- $image.repository }}{{ with $image.digest }}@{{ . }}{{ else }}:{{ $tag }}{{ end }}
{{- end -}}

{{- define "paceline.servedName" -}}
{{- default (.Values.model.source | trimSuffix "/" | splitList "/" | last | trimSuffix ".gguf") .Values.model.name -}}
{{- end -}}

{{- define "paceline.gatewayAccount" -}}
{{- default (printf "%s-gateway" (include "paceline.fullname" .)) .Values.gateway.serviceAccount.name -}}
{{- end -}}

{{- define "paceline.apiKeysSecret" -}}
{{- if .Values.apiKeys.existingSecret }}{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.values }}{{ include "paceline.fullname" . }}-api-keys{{ end }}
{{- end -}}

{{- define "paceline.valkeySecret" -}}
{{- default (printf "%s-valkey" (include "paceline.fullname" .)) .Values.redis.embedded.auth.existingSecret -}}
{{- end -}}

{{/* Port of a component's gRPC server. */}}
{{- define "paceline.grpcPort" -}}
{{- get (dict "gateway" "7400" "verifier" "50052" "drafter" "50053") . -}}
{{- end -}}

{{/* Where the gateway finds the replicas of a lane. Takes root, lane (verifier or drafter). */}}
{{- define "paceline.addresses" -}}
{{- $service := printf "%s-%ss" (include "paceline.fullname" .root) .lane -}}
{{- $discovery := .root.Values.discovery -}}
{{- if eq $discovery.mode "static" -}}
{{- join "," (index $discovery.static (printf "%ss" .lane)) -}}
{{- else if not (index .root.Values (printf "%ss" .lane)) -}}
{{- else if eq $discovery.mode "kubernetes" -}}
k8s://{{ .root.Release.Namespace }}/{{ $service }}:grpc
{{- else -}}
dns:///{{ $service }}.{{ .root.Release.Namespace }}.svc:{{ include "paceline.grpcPort" .lane }}
{{- end -}}
{{- end -}}
